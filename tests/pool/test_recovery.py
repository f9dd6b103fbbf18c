"""A host that was lost and comes back, with sessions that do what the test says: one thread waits for each node."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from stage.fakes import FakeNode, FakeSession
from stage.spot import until

import skyfab as sky
from skyfab.pool import recovery
from skyfab.pool.recovery import Recovery
from skyfab.ui.events import Event, Events, HostState

GONE = sky.HostLost("gone", host="node1")


class LostNode(FakeNode):
    def __init__(self) -> None:
        super().__init__()
        self.lost = GONE
        self.made: list[FakeSession] = []
        self.attempts: list[Callable[[], None]] = []
        """What becomes of the first attempts to open a session; later ones succeed."""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "PAUSE", 0.001)
    monkeypatch.setattr(recovery, "LONGEST", 0.002)


@pytest.fixture
def node() -> LostNode:
    return LostNode()


Begin = Callable[..., Recovery]


@pytest.fixture
def begin(node: LostNode) -> Iterator[Begin]:
    made: list[Recovery] = []

    def session_for(_: Any) -> Any:
        node.made.append(FakeSession())
        if node.attempts:
            node.made[-1].opens = node.attempts.pop(0)
        return node.made[-1]

    def start(on_recovered: Any, events: Events | None = None) -> Recovery:
        made.append(Recovery(session_for, on_recovered, events or Events()))
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_a_host_that_is_lost_again_while_it_is_taken_back_is_waited_for_once(node: LostNode, begin: Begin) -> None:
    """A second thread used to close the session of the first, and with it the calls of a healthy host."""
    welcomes: list[int] = []
    ended: list[bool] = []
    node.session.end_agent = lambda stopped: ended.append(stopped())

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
    until(lambda: ended == [False], "the end of the agent that it had before both")


def test_a_loss_in_the_moment_of_the_return_is_not_forgotten(node: LostNode, begin: Begin) -> None:
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


def test_a_host_that_is_lost_after_its_return_is_waited_for_again(node: LostNode, begin: Begin) -> None:
    home = begin(lambda _, accept: accept())
    for times in (1, 2, 3):
        home.expect(node, GONE)  # type: ignore[arg-type]
        until(lambda: node.lost is None)
        assert len(node.made) == times


def test_closing_does_not_wait_for_the_end_of_an_agent_that_does_not_answer(node: LostNode, begin: Begin) -> None:
    waiting = threading.Event()

    def never(stopped: Callable[[], bool]) -> None:
        waiting.set()
        until(stopped)
        raise sky.HostLost("stopped", host="node1")

    node.session.end_agent = never
    home = begin(lambda _, accept: accept())
    home.expect(node, GONE)  # type: ignore[arg-type]
    assert waiting.wait(30)
    home.close()


def fail() -> None:
    raise sky.HostLost("not yet", host="node1")


def fail_here() -> None:
    raise BlockingIOError(errno.EAGAIN, "no process can be started")


def fail_without_threads() -> None:
    raise RuntimeError("can't start new thread")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "skyfab-recovery"]


def test_a_host_that_cannot_be_reached_is_tried_until_it_can(node: LostNode, begin: Begin) -> None:
    before, found, events = node.session, list[Event](), Events()
    events.subscribe(found.append)
    node.lost, node.attempts = None, [fail, fail_here, fail_without_threads]
    home = begin(lambda _, accept: accept(), events)
    home.expect(node, GONE)  # type: ignore[arg-type]
    until(lambda: before.closed)
    assert [session.closed for session in node.made] == [True, True, True, False]
    assert node.session is node.made[3]
    assert found == [HostState(host="node1", state="ready", detail="rejoined the pool")]
    until(lambda: not threads())


def test_closing_ends_an_attempt_and_nothing_is_tried_until_the_pool_is_open_again(
    node: LostNode, begin: Begin
) -> None:
    trying, closed = threading.Event(), threading.Event()

    def hang() -> None:
        trying.set()
        closed.wait(30)
        fail()

    node.attempts = [hang]
    home = begin(lambda _, accept: accept())
    home.expect(node, GONE)  # type: ignore[arg-type]
    assert trying.wait(30)
    node.made[0].close = closed.set  # type: ignore[method-assign]
    home.close()
    assert threads() == []
    assert len(node.made) == 1
    home.expect(node, GONE)  # type: ignore[arg-type]
    assert threads() == []
    home.begin()
    home.expect(node, GONE)  # type: ignore[arg-type]
    until(lambda: node.lost is None)
    until(lambda: not threads())
