"""What a trial of a sweep reports, and how it is stopped."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stage.spot import until

import skyfab as sky
from skyfab.host.rank_channel import Channel, Head
from skyfab.host.sweep import Driver, TrialList, sweep
from skyfab.host.trial import REPORT, reported
from skyfab.pool.broadcast import rank_env


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


def test_a_report_is_limited_in_bytes(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for count in (10_000, 20_000):
        path.write_text(json.dumps({"word": "あ" * count}, ensure_ascii=False), "utf-8")
        assert len(reported(str(path)).get("word", "")) == (count if count == 10_000 else 0)


def test_a_report_does_nothing_in_a_program_that_is_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REPORT, raising=False)
    sky.report(loss=0.1, model=object())


# ---- the sweep that it belongs to

SAVES = """
import signal, sys, time
from pathlib import Path

signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(sys.argv[1])))
Path("ready").touch()
time.sleep(60)
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """That of a sweep of `saves.py`, outside a worker."""

    def start(words: list[str], *, placeholders: bool, env: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
        assert not placeholders
        return subprocess.Popen(words, env={**os.environ, **env}, **options)

    monkeypatch.setattr("skyfab.host.sweep.start", start)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "saves.py").write_text(SAVES)
    return Driver({"script": "saves.py", "share": None}, lambda trial: None)


def test_the_end_of_a_trial_is_reported_however_long_its_arguments_are(driver: Driver) -> None:
    secret, states = os.urandom(32), TrialList([1], [[None]], lambda trial: None, keep_going=False)
    listener = socket.create_server(("127.0.0.1", 0))
    head = Head(listener, secret, states.handle, states.gone)
    driver._channel = Channel.connect("127.0.0.1", listener.getsockname()[1], secret, 0)
    driver._plan |= {"trials": [{"trial": 1, "words": ["é" * 60_000]}], "hosts": ["a"]}
    try:
        trial = driver._next(None, "")
        assert trial is not None
        assert driver._next({**trial, "state": "done"}, "") is None
        assert states.states == ["done"]
    finally:
        driver._channel.close()
        head.close()


@pytest.mark.parametrize("code", [0, 1, 143])
def test_a_trial_that_ends_by_itself_when_it_is_stopped_is_neither_done_nor_failed(
    driver: Driver, tmp_path: Path, code: int
) -> None:
    with ThreadPoolExecutor() as threads:
        ended = threads.submit(driver._run, {"trial": 1, "folder": str(tmp_path / "1"), "words": [str(code)]}, None)
        until((tmp_path / "1" / "ready").exists)
        driver.stop()
        assert ended.result() is None
    assert not (tmp_path / "1" / "trial.json").exists()


def test_a_trial_that_starts_while_its_sweep_is_stopped_is_stopped_too(driver: Driver, tmp_path: Path) -> None:
    driver.stop()
    began = time.monotonic()
    assert driver._run({"trial": 1, "folder": str(tmp_path / "1"), "words": ["0"]}, None) is None
    assert time.monotonic() < began + 30


def begin(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], journal: io.BytesIO, *trials: Any) -> list[bool]:
    """Has rank 0 of a sweep begin, and stops it. Returns what it did not ask: whether it was stopped."""
    stopped = [True, False]
    driver = SimpleNamespace(run=lambda: None, stopped=SimpleNamespace(is_set=stopped.pop))
    listener = socket.create_server(("127.0.0.1", 0)).detach()
    others = {"context.take_listener": lambda: listener, "signal.signal": lambda *_: None, "os.environ": environ}
    for name, value in {**others, "Driver": lambda *_: driver, "open": lambda *_: journal}.items():
        monkeypatch.setattr(f"skyfab.host.sweep.{name}", value, raising=False)
    sweep({"trials": trials, "slots": [[None]], "keep_going": False, "secret": "00"})
    return stopped


def test_the_main_thread_holds_no_lock_that_the_handler_of_sigterm_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert begin(monkeypatch, {}, io.BytesIO()) == []


def test_a_trial_has_no_variables_of_a_rank_and_keeps_those_of_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    node: Any = SimpleNamespace(host=sky.Host(name="a"))
    own = {"LOCAL_DATA": "/d", "GROUP_ID": "7", "ROLE_ARN": "r", "MASTER_KEY": "k", "RANKING": "1", "WORLD_SIZES": "2"}
    environ = {**rank_env(defaultdict(int), node, ""), **own}
    begin(monkeypatch, environ, io.BytesIO())
    assert environ == own


def test_a_record_after_an_incomplete_one_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            return super().write(data if self.tell() else data[:9])

    trials = [{"trial": number, "state": "done"} for number in (1, 2)]
    begin(monkeypatch, {}, journal := Full(), *trials)
    assert json.dumps(trials[1]).encode() in journal.getvalue().splitlines()
