"""What is printed about a detached run: the lines that `skyfab logs` and `attach` print, tables, JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from skyfab.cli import report, runs, sweep
from skyfab.detached.logs import LogLine
from skyfab.detached.sweep import Trial

NOISE = "[W1116 10:00:00.123456789 socket.cpp:767] [c10d] The hostname of the client socket cannot be retrieved."


def test_what_frameworks_write_when_they_start_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [LogLine(host="node1", time=1.0, rank=0, stream="out", text=text) for text in (NOISE, "mine")]
    part = SimpleNamespace(host="node1", about=SimpleNamespace(ranks=(0,)))
    run: Any = SimpleNamespace(parts=[part], world_size=1, lines=lambda **_: iter(lines))
    runs._print(run, runs.LogOptions())
    assert capsys.readouterr().out.splitlines() == ["node1 mine"]


def test_a_rank_that_has_failed_while_others_run_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def lines(*, failed: Callable[[str, int], None], **_: object) -> Iterator[LogLine]:
        yield LogLine(host="node1", time=1.0, rank=0, stream="out", text="one")
        failed("node2", 1)

    part = SimpleNamespace(host="node1", about=SimpleNamespace(ranks=(0,)))
    run: Any = SimpleNamespace(id="3f2a91c0aa", parts=[part], world_size=2, state="running", lines=lines)
    runs._print(run, runs.LogOptions())
    said = "node2[1] has failed, the other ranks are still running; to stop them: skyfab stop 3f2a91c0"
    assert capsys.readouterr().err.splitlines() == [said]


def test_nothing_of_hosts_that_is_printed_for_programs_controls_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hostile = "\x1b]0;title \x9b2J \u202e \udcff"
    run: Any = SimpleNamespace(id="3f2a91c0aa", parts=[], phase=None, in_workdirs=list)
    trials = [Trial(trial=1, state="done", host=hostile), Trial(trial=2, state="done", host="node2")]
    report.print_json({"name": hostile})
    found = [capsys.readouterr().out]
    for text_of in (sweep._csv, sweep._json):
        sweep._report(trials, run, [("-", text_of)])
        found.append(capsys.readouterr().out)
    assert not set("\x1b\x9b\u202e").intersection("".join(found))
    assert [json.loads(found[0])["name"], json.loads(found[2])[0]["host"]] == [hostile] * 2
    assert [row["host"] for row in csv.DictReader(found[1].splitlines())][1] == "node2"
