"""What is printed about a detached run: the lines that `skyfab logs` and `attach` print, tables, JSON."""

from __future__ import annotations

import csv
import json
from types import SimpleNamespace
from typing import Any

import pytest

from skyfab.cli import report, sweep
from skyfab.detached.sweep import Trial


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
