"""The program `skyfab`, in a folder of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from stage.program import Skyfab, program


@pytest.fixture
def skyfab(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Skyfab:
    """``skyfab("hosts", "--json")``: the program, in this process and in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return program(monkeypatch, capfd)
