"""What `skyfab run` and `put` are given is looked at before anything is sent; what is near is named."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyfab.cli.put import mirrored
from skyfab.cli.run import parsed
from skyfab.errors import UsageError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("def train(): ...\ndef evaluate(): ...\ndef _inner(): ...\n")
    (tmp_path / "my data").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("trian.py", "did you mean train.py?"),
        ("trian.py:train", "did you mean train.py?"),
        ("my dta/x.py", "skyfab run --help"),
        ("my dat", "to run a program: skyfab run -- 'my dat'"),  # a folder has a similar name, but is not a script
        ("quite different.py", "skyfab run --help"),
        ("train.py:a b", "skyfab run train.py:main"),
    ],
)
def test_a_script_that_is_not_there(here: Path, target: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parsed(target)
    assert caught.value.hint == hint


def test_a_folder_that_cannot_be_mirrored_to_does_not_end_logs(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    noted = {"mirror": ["ckpt:train.py/results"], "limit": None, "to": str(here)}
    compute = SimpleNamespace(mirror=lambda *_, to, **__: to.mkdir())
    monkeypatch.setattr("skyfab.cli.put._noted", lambda run: noted)
    monkeypatch.setattr("skyfab.cli.put.file_pool", lambda *_: nullcontext(compute))
    run: Any = SimpleNamespace(inventory=None, in_workdirs=lambda: ["node1"])
    with mirrored(run) as is_named:
        assert is_named
    assert capsys.readouterr().err.startswith("not fetched: NotADirectoryError: ")
