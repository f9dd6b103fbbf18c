"""A host that was lost and comes back, with sessions that do what the test says: one thread waits for each node."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from stage.spot import until

import skyfab as sky
from skyfab.pool import recovery
from skyfab.pool.recovery import Recovery
from skyfab.ui.events import Events

GONE = sky.HostLost("gone", host="node1")


class FakeSession:
    def __init__(self, agent_ends: Callable[[Callable[[], bool]], None] = lambda stopped: None) -> None:
        self.has_ended = False
        self.closed = False
        self.end_agent = agent_ends

    def open(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class FakeNode:
    def __init__(self) -> None:
        self.index = 0
        self.name = "node1"
        self.lost: Exception | None = GONE
        self.session = FakeSession()
        self.made: list[FakeSession] = []

    def reset(self, session: FakeSession) -> None:
        self.session = session


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "PAUSE", 0.001)
    monkeypatch.setattr(recovery, "LONGEST", 0.002)


@pytest.fixture
def node() -> FakeNode:
    return FakeNode()


Begin = Callable[[Any], Recovery]


@pytest.fixture
def begin(node: FakeNode) -> Iterator[Begin]:
    made: list[Recovery] = []

    def session_for(_: Any) -> Any:
        node.made.append(FakeSession())
        return node.made[-1]

    def start(on_recovered: Any) -> Recovery:
        made.append(Recovery(session_for, on_recovered, Events()))
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_a_host_that_is_lost_again_while_it_is_taken_back_is_waited_for_once(node: FakeNode, begin: Begin) -> None:
    """A second thread used to close the session of the first, and with it the calls of a healthy host."""
    welcomes: list[int] = []

    def on_recovered(_: Any, accept: Callable[[], None]) -> None:
        welcomes.append(1)
        if len(welcomes) == 1:
            node.session.has_ended = True
            home.expect(node, sky.HostLost("again", host="node1"))  # type: ignore[arg-type]
        accept()

    home = begin(on_recovered)
    home.expect(node, GONE)  # type: ignore[arg-type]
    until(lambda: node.lost is None)
    assert len(welcomes) == 2
    assert [session.closed for session in node.made] == [True, False], "the first attempt's, and not the one in use"


def test_a_loss_in_the_moment_of_the_return_is_not_forgotten(node: FakeNode, begin: Begin) -> None:
    accepted = threading.Event()

    def on_recovered(_: Any, accept: Callable[[], None]) -> None:
        if not accepted.is_set():
            accepted.set()
            node.session.has_ended = True  # and its listener has not been told yet
        accept()

    home = begin(on_recovered)
    home.expect(node, GONE)  # type: ignore[arg-type]
    until(lambda: node.lost is None)
    assert len(node.made) == 2, "the session that ended was not taken for one that works"


def test_a_host_that_is_lost_after_its_return_is_waited_for_again(node: FakeNode, begin: Begin) -> None:
    home = begin(lambda _, accept: accept())
    for times in (1, 2, 3):
        home.expect(node, GONE)  # type: ignore[arg-type]
        until(lambda: node.lost is None)
        assert len(node.made) == times


def test_closing_does_not_wait_for_the_end_of_an_agent_that_does_not_answer(node: FakeNode, begin: Begin) -> None:
    waiting = threading.Event()

    def never(stopped: Callable[[], bool]) -> None:
        waiting.set()
        until(stopped)
        raise sky.HostLost("stopped", host="node1")

    node.session = FakeSession(never)
    home = begin(lambda _, accept: accept())
    home.expect(node, GONE)  # type: ignore[arg-type]
    assert waiting.wait(30)
    home.close()
