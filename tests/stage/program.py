"""The program `skyfab` in the process of the tests: what it prints, and its exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from skyfab.cli import tasks


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Skyfab = Callable[..., Ran]
"""``skyfab("hosts", "--json")``"""


def program(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Skyfab:
    def run(*words: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["skyfab", *words])
        capfd.readouterr()
        try:
            tasks.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        return Ran(code, *capfd.readouterr())

    return run
