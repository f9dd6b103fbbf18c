"""Stall detection with a clock that is set by hand: what counts as progress, and how often a stall is reported."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from stage.spot import until

import skyfab as sky
from skyfab.pool import stall
from skyfab.pool.futures import CallFuture
from skyfab.pool.stall import _StallWatch, watch
from skyfab.protocol import messages
from skyfab.ui.events import Event, Events, Stalled


class FakeSession:
    def __init__(self) -> None:
        self.function, self.line = "train", 1
        self.asked = threading.Event()
        self.is_gone = False

    def send(self, message: Any, *, answer: Any) -> None:
        self.asked.set()
        if self.is_gone:
            raise sky.HostLost("gone", host="node1")
        text = f'Thread 0x1 (most recent call first):\n  File "/a.py", line {self.line} in {self.function}\n'
        answer(messages.Done(text=text), [])


class Stage:
    """Looks once for each second that passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hosts: int = 1) -> None:
        self.now = 1000.0
        monkeypatch.setattr(stall, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.nodes: list[Any] = [SimpleNamespace(name=f"node{n}", session=FakeSession()) for n in range(hosts)]
        self.found: list[Event] = []
        events = Events()
        events.subscribe(self.found.append)
        self._watch = _StallWatch(lambda: [(node, "solo.0", None) for node in self.nodes], 10, "f", events)

    def pass_time(self, seconds: int) -> None:
        self._watch.run(Ticks(self, seconds))  # type: ignore[arg-type]


class Ticks:
    """Takes the place of the event that a call is over."""

    def __init__(self, stage: Stage, left: int) -> None:
        self._stage, self._left = stage, left

    def wait(self, seconds: float) -> bool:
        assert seconds == 1, "ten times within the time of a stall"
        self._left -= 1
        self._stage.now += 1
        return self._left < 0


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def test_a_process_that_stands_still_is_reported_once(stage: Stage) -> None:
    stage.pass_time(10)
    assert stage.found == []
    stage.pass_time(1)
    (found,) = stage.found
    assert isinstance(found, Stalled)
    assert (found.host, found.function, found.seconds) == ("node0", "f", 10)
    assert "train" in found.text
    stage.pass_time(30)
    assert len(stage.found) == 1


def test_another_function_is_progress(stage: Stage) -> None:
    for number in range(5):
        stage.nodes[0].session.function = f"step{number}"
        stage.pass_time(9)
    assert stage.found == []


def test_a_lost_host_makes_no_stall_and_keeps_nobody_from_being_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, hosts=2)
    stage.nodes[0].session.is_gone = True
    stage.pass_time(11)
    assert [event.host for event in stage.found] == ["node1"]


def test_nobody_is_looked_at_after_the_end_of_the_call() -> None:
    future, session = CallFuture(), FakeSession()
    node: Any = SimpleNamespace(name="node1", session=session)
    watch(future, lambda: [(node, "solo.0", None)], 0.01, "f", Events())
    assert session.asked.wait(30)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "skyfab-stall")
    future.settle(1)
    until(lambda: not any(thread.name == "skyfab-stall" for thread in threading.enumerate()))
