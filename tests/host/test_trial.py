"""What a trial of a sweep reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import skyfab as sky
from skyfab.host.trial import REPORT


def test_a_report_has_the_last_value_of_each_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    path.write_text('{"from": "another process"}')
    monkeypatch.setenv(REPORT, str(path))
    sky.report(loss=1.0, epoch=1)
    sky.report(loss=0.5, best=float("nan"), worst=-float("inf"), done=True)
    found = {"from": "another process", "loss": 0.5, "epoch": 1, "best": "nan", "worst": "-inf", "done": True}
    assert json.loads(path.read_text()) == found
    assert [one.name for one in tmp_path.iterdir()] == ["report.json"]


def test_a_report_takes_numbers_of_other_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Scalar:
        def item(self) -> float:
            return 0.25

    monkeypatch.setenv(REPORT, str(tmp_path / "report.json"))
    sky.report(loss=Scalar())
    assert json.loads((tmp_path / "report.json").read_text()) == {"loss": 0.25}
    with pytest.raises(TypeError, match=r"report\(model=…\): expected a number or a string, not a list"):
        sky.report(model=[1])


def test_a_report_does_nothing_in_a_program_that_is_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REPORT, raising=False)
    sky.report(loss=0.1, model=object())
