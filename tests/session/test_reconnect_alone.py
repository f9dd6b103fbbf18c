"""The reconnector, step by step, with a connection and attempts that are what the test says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import skyfab as sky
from skyfab.session import reconnect
from skyfab.session.reconnect import MOST_ATTEMPTS, Reconnector, as_lost
from skyfab.session.timing import Timing
from skyfab.ssh.base import AgentGone


class Closable:
    """A stream or a transport."""

    def __init__(self, why: Exception | None = None) -> None:
        self.why = why
        self.closed = 0

    def explain(self) -> Exception:
        assert self.why is not None
        return self.why

    def close(self) -> None:
        self.closed += 1


class Suspect:
    """A connection that has lost its stream; what a host answers to attempts is in `outcomes`."""

    host = "node1"

    def __init__(self, lease: float = 60) -> None:
        self.now = 1000.0
        self.timing = Timing(lease=lease, heartbeat_timeout=10, heartbeat=1, suspect_after=3, clock=lambda: self.now)
        self.lock = threading.Lock()
        self.pings = 0
        self.replies: Any = SimpleNamespace(
            hellos=1, mux=SimpleNamespace(last_received=self.now, ping=self._ping, echoed=0)
        )
        self.told: list[tuple[Any, ...]] = []
        self.others = False
        self.listener: Any = SimpleNamespace(
            on_disconnect=lambda reason: self.told.append(("apart", reason)),
            on_reconnect=lambda seconds: self.told.append(("together", seconds)),
            others_respond=lambda: self.others,
        )
        self.joiner: Any = SimpleNamespace(transport=self._transport, rejoin=self._rejoin)
        self.stream: Any = None
        self.is_suspect = True
        self.woken = 0
        self.outcomes: list[Any] = []
        self.transports: list[Closable] = []
        self.stopped: list[Callable[[], bool]] = []
        self.reconnector = Reconnector(self, "why")

    def _ping(self) -> int:
        self.pings += 1
        return 7

    def _transport(self) -> Closable:
        self.transports.append(Closable())
        return self.transports[-1]

    def _rejoin(self, transport: Any, deadline: float, stopped: Callable[[], bool]) -> Any:
        self.stopped.append(stopped)
        outcome = self.outcomes.pop(0) if self.outcomes else sky.HostLost("no route", host="node1")
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def resume(self) -> None:
        assert self.lock.locked()
        self.is_suspect = False

    def wake(self) -> None:
        assert not self.lock.locked()
        self.woken += 1

    def step(self) -> bool:
        return self.reconnector.step(self.now)

    def switch(self) -> Any:
        """What a connection does when it is woken."""
        link = self.reconnector.take_candidate()
        assert link is not None
        self.stream = link[0]
        return link


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Attempts that are made when the test says so."""
    works: list[Callable[[], None]] = []
    monkeypatch.setattr(reconnect, "spawn", lambda work, name: works.append(work))
    return works


@pytest.fixture
def suspect(monkeypatch: pytest.MonkeyPatch) -> Suspect:
    monkeypatch.setattr(reconnect, "spawn", lambda work, name: work())
    return Suspect()


def test_a_disconnect_is_told_once(suspect: Suspect) -> None:
    assert suspect.step()
    assert suspect.step()
    assert suspect.told == [("apart", "why")]
    assert suspect.pings == 1


def test_the_connection_resumes_when_its_own_stream_echoes(suspect: Suspect) -> None:
    suspect.stream = Closable()
    suspect.replies.mux.echoed = 6
    assert suspect.step()
    suspect.replies.mux.echoed = 7
    suspect.now += 2
    assert not suspect.step()
    assert not suspect.is_suspect
    assert suspect.told == [("apart", "why"), ("together", 2.0)]


def test_an_echo_without_a_stream_is_none(suspect: Suspect) -> None:
    suspect.replies.mux.echoed = 7
    assert suspect.step()
    assert suspect.is_suspect


def test_a_connection_that_is_closed_meanwhile_ends_it_quietly(suspect: Suspect) -> None:
    suspect.is_suspect = False
    assert not suspect.step()
    assert suspect.told == [("apart", "why")]
    assert suspect.woken == 0


def test_the_first_stream_is_offered_and_resumes_with_its_hello(suspect: Suspect) -> None:
    stream = Closable()
    suspect.outcomes = [stream]
    assert suspect.step()
    assert suspect.woken == 0
    assert suspect.step()
    assert suspect.woken == 1
    assert suspect.switch()[0] is stream
    assert suspect.reconnector.take_candidate() is None
    assert suspect.step(), "no hello yet"
    suspect.now += 2
    attempts = len(suspect.transports)
    assert suspect.step()
    assert len(suspect.transports) == attempts, "it may come soon"
    suspect.now += 2
    assert suspect.step()
    assert len(suspect.transports) == attempts + 1
    suspect.replies.hellos = 2
    assert not suspect.step()
    assert suspect.told[-1] == ("together", 4.0)


def test_no_attempt_is_made_while_a_stream_waits_to_be_taken(suspect: Suspect) -> None:
    suspect.outcomes = [Closable()]
    suspect.step()
    suspect.step()
    suspect.now += 10
    suspect.step()
    assert len(suspect.transports) == 1


def test_of_two_streams_the_first_is_taken_and_the_other_closed(waiting: list[Callable[[], None]]) -> None:
    suspect = Suspect()
    first, second = Closable(), Closable()
    suspect.outcomes = [first, second]
    suspect.step()
    suspect.now += 1
    suspect.step()
    for work in waiting:
        work()
    suspect.step()
    assert suspect.switch()[0] is first
    assert (first.closed, second.closed) == (0, 1)
    assert [transport.closed for transport in suspect.transports] == [0, 1]


def test_a_stream_that_comes_after_the_end_is_closed(suspect: Suspect) -> None:
    assert suspect.reconnector._offer((Closable(), Closable())) is True  # type: ignore[arg-type]
    suspect.is_suspect = False
    suspect.reconnector.candidate = None
    assert suspect.reconnector._offer((Closable(), Closable())) is False  # type: ignore[arg-type]


def test_there_are_so_many_attempts_at_once_and_the_oldest_is_abandoned(waiting: list[Callable[[], None]]) -> None:
    suspect = Suspect()
    streams = [Closable() for _ in range(MOST_ATTEMPTS + 1)]
    suspect.outcomes = list(streams)
    for _ in streams:
        suspect.now += 1
        suspect.step()
    assert len(waiting) == MOST_ATTEMPTS + 1
    for work in waiting:
        work()
    assert [stream.closed for stream in streams] == [1] + [0] * MOST_ATTEMPTS
    assert suspect.stopped[0]()
    assert not suspect.stopped[1]()
    assert suspect.transports[0].closed == 1


def test_an_attempt_that_fails_closes_its_transport_and_is_followed_by_another(suspect: Suspect) -> None:
    suspect.step()
    suspect.now += 1
    assert suspect.step()
    assert [transport.closed for transport in suspect.transports] == [1, 1]


def test_at_the_end_attempts_and_a_stream_that_nobody_took_are_closed(waiting: list[Callable[[], None]]) -> None:
    suspect = Suspect()
    candidate, late = Closable(), Closable()
    suspect.outcomes = [late]
    suspect.step()
    suspect.reconnector.candidate = (candidate, Closable())  # type: ignore[assignment]
    suspect.reconnector._drop()
    waiting[0]()
    assert (candidate.closed, late.closed) == (1, 1)
    assert suspect.reconnector.candidate is None


@pytest.mark.parametrize(
    ("outcome", "text"),
    [(sky.HostUnfit("no agent", host="node1"), "started again"), (ZeroDivisionError("a defect"), "a defect")],
)
def test_some_failures_are_final(suspect: Suspect, outcome: Exception, text: str) -> None:
    suspect.outcomes = [outcome]
    assert suspect.step()
    assert not suspect.step()
    assert text in str(suspect.reconnector.lost_error)
    assert suspect.woken == 1


def test_a_host_is_lost_after_its_lease(suspect: Suspect) -> None:
    suspect.now += 60
    assert suspect.step()
    suspect.now += 1
    assert not suspect.step()
    assert "lease of 60 s" in str(suspect.reconnector.lost_error)


def test_a_host_is_lost_sooner_while_others_respond(suspect: Suspect) -> None:
    suspect.others = True
    suspect.now += 10
    assert suspect.step()
    suspect.now += 1
    assert not suspect.step()
    assert "while other hosts respond" in str(suspect.reconnector.lost_error)


def test_others_that_respond_again_start_the_time_anew(suspect: Suspect) -> None:
    suspect.now += 20
    assert suspect.step()
    suspect.others = True
    assert suspect.step()
    suspect.now += 10
    assert suspect.step()
    suspect.now += 1
    assert not suspect.step()


@pytest.mark.parametrize(
    ("lease", "kind", "final"), [(60, sky.HostLost, False), (60, AgentGone, True), (0, sky.HostLost, True)]
)
def test_why_a_stream_broke_may_say_that_the_host_is_lost(
    monkeypatch: pytest.MonkeyPatch, lease: float, kind: type[sky.HostLost], final: bool
) -> None:
    monkeypatch.setattr(reconnect, "spawn", lambda work, name: work())
    suspect = Suspect(lease)
    suspect.reconnector._reason = ""
    stream, transport = Closable(kind("cut", host="node1")), Closable()
    suspect.reconnector.broke((stream, transport))  # type: ignore[arg-type]
    assert suspect.step() is not final
    assert (stream.closed, transport.closed) == (1, 1)
    if final:
        assert suspect.told == []
        assert suspect.reconnector.lost_error is stream.why
    else:
        assert suspect.told == [("apart", "cut")]


def test_a_reason_that_is_known_is_kept(suspect: Suspect) -> None:
    suspect.reconnector.broke((Closable(OSError("reset")), Closable()))  # type: ignore[arg-type]
    suspect.step()
    assert suspect.told == [("apart", "why")]


def test_whatever_ends_an_open_connection_the_host_is_lost() -> None:
    lost = sky.HostLost("gone", host="node1")
    assert as_lost(lost, "node2") is lost
    unfit = sky.HostUnfit("full", host="node1", hint="make room")
    found = as_lost(unfit, "node1")
    assert (found.message, found.host, found.hint, found.__cause__) == ("full", "node1", "make room", unfit)
    assert as_lost(ValueError("odd"), "node1").message == "odd"
