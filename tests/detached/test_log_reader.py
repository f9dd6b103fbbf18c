"""`LogReader`: how it reads page by page, and goes on after an answer that did not come."""

from __future__ import annotations

from typing import Any

import pytest
from stage.run_hosts import Hosts, Several, lines, lost

from skyfab.detached.logs import LogReader
from skyfab.session.ask import Asker


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    hosts = Hosts("a", "b")
    monkeypatch.setattr(Asker, "ask_one", lambda asker, question, host: hosts.answer(asker, question, host))
    hosts.says |= {("a", "logs"): lines(), ("b", "logs"): lines()}
    return hosts


def reader(hosts: Hosts, **options: Any) -> LogReader:
    return LogReader(Asker(hosts.hosts[:], hosts.inventory), "run", **options)


def texts(reader: LogReader, *, rest: bool = False) -> list[str]:
    return [line.text for line in reader.new(rest=rest)]


def page(text: str, cursor: int, *, more: bool = False) -> dict[str, Any]:
    return {**lines((0, text, float(cursor)), more=more), "cursors": {"0.out": [1, cursor, 2.0]}}


def test_pages_are_read_to_the_last_one(hosts: Hosts) -> None:
    hosts.hosts.pop()
    hosts.says["a", "logs"] = Several(
        page("one", 1, more=True), page("two", 2, more=True), page("three", 3), page("4", 4)
    )
    found = reader(hosts, started=9.0, rank=0, tail=5, since=8.0)
    assert texts(found) == ["one", "two", "three"]
    assert texts(found, rest=True) == ["4"]
    fixed = {"run": "run", "started": 9.0, "rank": 0, "since": 8.0}
    cursors = [{"0.out": (1, number, 2.0)} for number in (1, 2, 3)]
    assert hosts.arguments == [
        {**fixed, "cursors": {}, "rest": False, "tail": 5},
        {**fixed, "cursors": cursors[0], "rest": False, "tail": None},
        {**fixed, "cursors": cursors[1], "rest": False, "tail": None},
        {**fixed, "cursors": cursors[2], "rest": True, "tail": None},
    ]


def test_a_host_that_does_not_answer_is_left_out_for_now(hosts: Hosts) -> None:
    hosts.says["a", "logs"] = Several(lost("a"), page("late", 1))
    hosts.says["b", "logs"] = Several(page("one", 1, more=True), lost("b"), page("two", 2), lines())
    found = reader(hosts)
    assert texts(found) == ["one"]
    assert sorted(str(error.host) for error in found.errors) == ["a", "b"]
    assert sorted(texts(found)) == ["late", "two"]
    assert found.errors == []
    assert hosts.arguments[3]["cursors"] == {"0.out": (1, 1, 2.0)} or hosts.arguments[4]["cursors"] == {
        "0.out": (1, 1, 2.0)
    }, "where it stopped"
