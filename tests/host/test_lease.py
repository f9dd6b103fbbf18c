"""How long an agent waits for its client: the decision, by a clock of the test's own."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator

import pytest

from skyfab.host.agent.connection import Connection
from skyfab.host.agent.lease import Lease


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lease(clock: Clock) -> Lease:
    return Lease(clock)


def test_before_the_first_hello_half_a_minute_is_waited(lease: Lease, clock: Clock) -> None:
    assert lease.until(None) == clock.now + 30


def test_a_silent_connection_has_the_whole_lease_from_when_it_was_last_heard(lease: Lease, clock: Clock) -> None:
    lease.agree(60)
    assert lease.until(clock.now - 7) == clock.now + 53


def test_a_connection_that_broke_has_the_whole_lease(lease: Lease, clock: Clock) -> None:
    lease.agree(60)
    clock.now += 5
    lease.disconnected()
    assert lease.until(None) == clock.now + 60


@pytest.mark.parametrize(("agreed", "seconds"), [(60, 10), (3600, 10), (10, 10), (2, 2), (0, 0)])
def test_a_program_that_has_ended_is_waited_for_ten_seconds_at_most(
    lease: Lease, clock: Clock, agreed: float, seconds: float
) -> None:
    lease.agree(agreed)
    lease.disconnected()
    began = clock.now
    clock.now += 0.25
    lease.is_program_ended = True
    assert lease.until(None) == began + seconds


def test_a_client_that_came_back_has_its_whole_lease_again(lease: Lease, clock: Clock) -> None:
    lease.agree(60)
    lease.disconnected()
    lease.is_program_ended = True
    clock.now += 4
    lease.agree(60)
    assert lease.until(clock.now) == clock.now + 60, "while it is connected"
    clock.now += 4
    lease.disconnected()
    assert lease.until(None) == clock.now + 60, "when that connection breaks"


# ---- what is left of a connection


class Ends:
    """What a link has handed over, and what the other side holds: a pipe each way, or one socket for both."""

    def __init__(self, kind: str) -> None:
        self.link, self._sleeper = socket.socketpair()
        if kind == "pipes":
            source, self._to_us = os.pipe()
            self._from_us, sink = os.pipe()
            self._theirs = {self._to_us, self._from_us}
        else:
            ours, self._socket = socket.socketpair()
            source, sink = os.dup(ours.fileno()), os.dup(ours.fileno())
            ours.close()
            self._theirs = set()
        self._kind = kind
        self.connection = Connection(self.link, source, sink)

    def end_input(self) -> None:
        if self._kind == "pipes":
            os.close(self._to_us)
            self._theirs.discard(self._to_us)
        else:
            self._socket.shutdown(socket.SHUT_WR)

    def end_output(self) -> None:
        if self._kind == "pipes":
            os.close(self._from_us)
            self._theirs.discard(self._from_us)
        else:
            self._socket.shutdown(socket.SHUT_RD)

    def end_both(self) -> None:
        for fd in self._theirs:
            os.close(fd)
        self._theirs.clear()
        if self._kind == "socket":
            self._socket.close()


@pytest.fixture(params=["pipes", "socket"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """As different sshd hand it to a program."""
    made = Ends(request.param)
    yield made
    made.end_both()
    made.connection.close()
    made._sleeper.close()


@pytest.mark.parametrize("what", [Ends.end_input, Ends.end_output], ids=["input", "output"])
def test_one_direction_that_ends_alone_is_an_end_in_good_order(ends: Ends, what: Callable[[Ends], None]) -> None:
    assert ends.connection.is_there()
    what(ends)
    assert ends.connection.is_there()


def test_both_directions_that_end_are_a_connection_that_broke(ends: Ends) -> None:
    ends.end_both()
    assert not ends.connection.is_there()


def test_what_has_arrived_before_the_end_does_not_matter(ends: Ends) -> None:
    if ends._kind == "pipes":
        os.write(ends._to_us, b"unread")
    else:
        ends._socket.send(b"unread")
    ends.end_input()
    assert ends.connection.is_there()
    ends.end_both()
    assert not ends.connection.is_there()
