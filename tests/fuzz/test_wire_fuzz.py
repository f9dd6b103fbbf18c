"""The wire under mutation: recorded conversations with something wrong in them, into both sides of the protocol.

Whatever arrives, it is understood or it is a ProtocolError (for this machine: a SkyfabError); nothing else is raised,
nothing hangs, and nothing is held in memory that did not arrive.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mutation import PIECES, RECORDED, Source, mutated
from recording import CONVERSATIONS, CORPUS, SIDES, Ear, Frame, record

from skyfab.errors import ProtocolError, SkyfabError
from skyfab.host.agent import handlers
from skyfab.host.agent import store as store_module
from skyfab.host.agent import workers as seats_module
from skyfab.host.agent.agent import Agent
from skyfab.host.agent.store import Writer
from skyfab.protocol import VERSION, messages
from skyfab.protocol.frames import DATA, HEAD, HELLO
from skyfab.session.replies import PendingRequest, Replies

QUICK, LONG = 120, 20_000
"""Examples of each kind: always, and with ``--soak``."""


def fuzz(examples: int = QUICK) -> settings:
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.large_base_example]
    return settings(database=None, deadline=None, max_examples=examples, suppress_health_check=checks)


def whole(name: str, side: str) -> bytes:
    return b"".join(frame.encode() for frame in RECORDED[name][side])


def discard(buffers: Sequence[bytes | memoryview]) -> int:
    return sum(map(len, buffers))


# ---- the corpus


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_corpus_is_what_is_recorded_today(name: str, tmp_path: Path) -> None:
    """Else: python tests/fuzz/recording.py."""
    found = record(CONVERSATIONS[name], tmp_path / "cache")
    for side in SIDES:
        assert found[side] == (CORPUS / f"{name}.{side}").read_bytes(), f"{name}.{side} is from another day"


# ---- this machine, which hears a host


class Client:
    """The receiving half of a session that waits for answers on the first streams, read by this thread."""

    def __init__(self) -> None:
        self.replies = Replies("node1", Ear(), time.monotonic)
        self.replies.mux.attach(b"{}")
        self.answers: list[messages.Message] = []
        for stream in range(1, 41, 2):
            self.replies.mux.send(stream, b"{}", [bytes(40_000)] if stream == 5 else [])
            self.replies.pending[stream] = PendingRequest(self._answer, self._failure, "0")

    def _answer(self, message: messages.Message, buffers: list[memoryview]) -> None:
        assert isinstance(message, messages.Message)
        self.answers.append(message)

    def _failure(self, error: Exception) -> None:
        raise AssertionError("a failure that did not happen")

    def hear(self, data: bytes, pieces: Sequence[int] = (1 << 20,)) -> None:
        source, mux = Source(data, pieces), self.replies.mux
        while mux.read(source):
            mux.flush(discard)
            for tell in self.replies.take():
                tell()


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("piece", [1 << 20, 100])
def test_a_recorded_host_is_understood(name: str, piece: int) -> None:
    """Else mutations of it prove nothing."""
    client = Client()
    client.hear(whole(name, "host"), [piece])
    asked = sum(frame.kind == HEAD and frame.stream % 2 for frame in RECORDED[name]["host"])
    assert len(client.answers) == asked > 2


def check_host(data: bytes, pieces: Sequence[int]) -> None:
    with contextlib.suppress(SkyfabError):
        Client().hear(data, pieces)


@fuzz()
@given(mutated("host"), PIECES)
@example(whole("calls", "client"), [1 << 20])
@example(whole("bulk", "host") * 2, [17])
def test_whatever_a_host_says_is_heard_or_a_typed_error(data: bytes, pieces: list[int]) -> None:
    check_host(data, pieces)


@fuzz(40)
@given(mutated("host", most=8))
def test_what_a_host_announces_and_does_not_send_is_not_held(data: bytes) -> None:
    tracemalloc.start()
    try:
        check_host(data, [1 << 20])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12_000_000 + 4 * len(data)  # a frame may announce 4 MiB, and streams wait with 16


def test_many_parts_that_never_come_are_not_held() -> None:
    """Each too small to be mapped, and together as large as this machine: memory for them is not touched."""
    head = messages.Result(parts=[(1 << 20) - 1] * 256).encode()
    hello = RECORDED["calls"]["host"][0].encode()
    tracemalloc.start()
    try:
        check_host(hello + Frame(HEAD, 0, 1, head).encode(), [1 << 20])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20_000_000


# ---- a host, which hears a client or its ranks


class Nursery:
    """In place of a zygote: ranks that never run. Their ends of the pipes are kept."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self.sinks: list[int] = []

    def fileno(self) -> int:
        return self._ours.fileno()

    def spawn(self, request: dict[str, Any], fds: list[int]) -> None:
        json.dumps(request)
        os.set_blocking(fds[1], False)
        self.sinks.append(os.dup(fds[1]))

    def kill(self, rank: int, number: int = 9, *, alone: bool = False) -> None: ...
    def notices(self) -> list[tuple[str, int, int]]:
        return []

    def cry(self) -> None:
        """Ends a wait for everything."""
        self._theirs.send(b"!")

    def close(self) -> None:
        for end in (self._ours, self._theirs):
            end.close()
        for fd in self.sinks:
            os.close(fd)


class Host:
    """An agent in this process, whose client is bytes. What would kill it is raised here."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.writers: list[Writer] = []
        run = folder / "run"
        run.mkdir(parents=True)
        os.chdir(run)
        self.nursery = Nursery()
        self.agent = Agent(socket.socket(socket.AF_UNIX), self.nursery, cache=str(folder / "cache"), session="0")  # type: ignore[arg-type]
        self.agent.mux.attach(b"{}")

    def hear(self, data: bytes, pieces: Sequence[int] = (1 << 20,)) -> None:
        """As `Agent._read` does, and the rounds of its loop."""
        source, alive = Source(data, pieces), True
        while alive:
            try:
                alive = self.agent.mux.read(source)
            except (OSError, ProtocolError):
                alive = False
            self.turn()

    def turn(self) -> None:
        agent = self.agent
        agent._poller.wait(0)
        agent._workers.pass_on()
        agent.mux.flush(discard)
        assert agent._wait_time() >= 0

    def close(self) -> None:
        """An agent ends with its process, and what it had open with it: here somebody has to."""
        agent = self.agent
        for worker in agent._workers:
            agent._workers._reap(worker, 0)
        agent._clean_up()
        for log in agent._workers.behind:
            log.close()
        for writer in self.writers:
            writer.abort()
        for listener in agent._handlers._ports._sockets.values():
            listener.close()
        agent._poller._poll.close()
        shutil.rmtree(self._folder)


Make = Callable[[], contextlib.AbstractContextManager[Host]]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """``with host() as one:`` an agent in a folder of its own; nothing it does leaves this process."""
    monkeypatch.setattr(handlers, "PeerProbe", lambda peers, patience, watch, done: done([]))
    monkeypatch.setattr(seats_module, "_CLOSE_TIMEOUT", 0.0)
    before, number = Path.cwd(), 0

    @contextlib.contextmanager
    def make() -> Iterator[Host]:
        nonlocal number
        number += 1
        made = Host(tmp_path / str(number))

        class Noted(Writer):
            def __init__(self, *about: str) -> None:
                super().__init__(*about)
                made.writers.append(self)

        monkeypatch.setattr(store_module, "Writer", Noted)
        try:
            yield made
        finally:
            made.close()

    yield make
    os.chdir(before)
    assert not list(tmp_path.iterdir()), "something was written outside of its folders"


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_client_is_understood(host: Make, name: str) -> None:
    with host() as one:
        before = one.agent.mux.received
        one.hear(whole(name, "client"))
        assert one.agent.mux.received - before == sum(frame.kind >= HEAD for frame in RECORDED[name]["client"])
        assert len(one.nursery.sinks) == 1


@fuzz()
@given(mutated("client"), PIECES)
@example(whole("calls", "host"), [1 << 20])
@pytest.mark.slow
def test_whatever_a_client_says_the_agent_goes_on(host: Make, data: bytes, pieces: list[int]) -> None:
    with host() as one:
        one.hear(data, pieces)


NOT_A_MESSAGE = [
    Frame(HEAD, 0, 1, b'{"op":"result","parts":[100]}'),
    Frame(DATA, 0, 2, b"on the stream of its log, so that what follows has to wait"),
    Frame(HEAD, 0, 11, b'{"op":"result","parts":[4]}\x80'),
]


@fuzz()
@given(mutated("host", greet=False))
@example(b"".join(map(Frame.encode, NOT_A_MESSAGE)))
@pytest.mark.slow
def test_whatever_a_rank_says_the_agent_goes_on(host: Make, data: bytes) -> None:
    """User code has the pipe to the agent in its process, and may write to it."""
    setup = [frame for frame in RECORDED["calls"]["client"] if frame.kind == HELLO or frame.stream <= 11]
    with host() as one:
        one.hear(b"".join(frame.encode() for frame in setup))
        (sink,) = one.nursery.sinks
        rest = memoryview(data)
        with contextlib.suppress(BlockingIOError):  # it is not listened to any more
            while rest:
                rest = rest[os.write(sink, rest[:60_000]) :]
                one.turn()
        one.turn()


@pytest.mark.parametrize("lease", [0.0, 60.0, -5.0, 1e18, math.inf, math.nan])
def test_a_lease_of_any_length_can_be_waited_for(host: Make, lease: float) -> None:
    """Or is refused."""
    hello = messages.ClientHello(protocol=VERSION, received=0, lease=lease).encode()
    with host() as one:
        one.hear(Frame(HELLO, 0, 0, hello).encode())
        assert one.agent._until() >= 0, "it never ends"
        one.nursery.cry()
        one.agent._poller.wait(one.agent._wait_time())


# ---- at length


@pytest.mark.soak
@pytest.mark.timeout(1200)
@fuzz(LONG)
@given(st.sampled_from(SIDES), st.data())
def test_at_length(host: Make, side: str, data: st.DataObject) -> None:
    said, pieces = data.draw(mutated(side, most=12)), data.draw(PIECES)
    check_host(said, pieces)
    with host() as one:
        one.hear(said, pieces)
