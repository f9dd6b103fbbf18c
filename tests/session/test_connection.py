"""The states of a connection, arrow by arrow: a real stream, a clock that is set by hand, and one thread."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
from stage.fakes import Listener
from stage.messages import filled

import skyfab as sky
from skyfab.protocol import VERSION, messages
from skyfab.protocol.frames import BYE, HEAD, HEADER, HELLO, LIMIT, PING, PONG, frame
from skyfab.session import reconnect
from skyfab.session.connection import Connection
from skyfab.session.reader import SharedReader, run
from skyfab.session.reconnect import Reconnector
from skyfab.session.state import State
from skyfab.session.timing import Timing
from skyfab.ssh.base import AgentGone

HOST = sky.Host(name="node1", address="192.0.2.1")


START = Reconnector.start


class Clock:
    def __init__(self) -> None:
        self.now = time.monotonic()  # the reader has no other clock

    def __call__(self) -> float:
        return self.now


class HandReader(SharedReader):
    """Reads when it is told to: nothing happens behind a test's back."""

    def _start(self) -> threading.Thread:
        return threading.current_thread()

    def turn(self) -> None:
        """Handles what has come, until nothing more does."""
        for _ in range(5):
            self._tick_at = time.monotonic() + 60
            self.poke()
            self._read_once()

    def wait(self, done: Callable[[], bool], timeout: float | None = None, of: object = None) -> bool:
        ends = time.monotonic() + (60 if timeout is None else timeout)
        while not done() and self._connections and time.monotonic() < ends:
            self._tick_at = 0.0
            self._read_once()
        return done()

    def join(self, timeout: float) -> None: ...


class Stream:
    """One end of a socket pair; the test holds the other."""

    made: ClassVar[list[Stream]] = []

    def __init__(self) -> None:
        self.made.append(self)
        self.ours, self.agent = socket.socketpair()
        self.ours.setblocking(False)
        self.agent.setblocking(False)
        self.why: Exception = sky.HostLost("the connection ended", host="node1")
        self.closed = False

    def fileno(self) -> int:
        return self.ours.fileno()

    def sink(self) -> int | None:
        return None

    def stderr(self) -> int | None:
        return None

    def drain(self) -> None: ...

    def recv_into(self, view: memoryview) -> int:
        return self.ours.recv_into(view)

    def send(self, buffers: Sequence[bytes | memoryview]) -> int:
        return self.ours.sendmsg(buffers)

    def explain(self) -> Exception:
        return self.why

    def close(self) -> None:
        self.closed = True
        self.ours.close()

    # ---- what the agent does

    def say(self, *frames: bytes) -> None:
        self.agent.sendall(b"".join(frames))

    def hello(self, received: int = 0) -> None:
        about: dict[str, Any] = {"address": "192.0.2.1", "gpus": 0, "received": received}
        self.say(frame(HELLO, 0, filled(messages.AgentHello, protocol=VERSION, **about).encode()))

    def frames(self) -> list[tuple[int, int, bytes]]:
        """The frames that came to the agent since the last look: kind, stream number and payload."""
        try:
            data = self.agent.recv(1 << 20)
        except BlockingIOError:
            return []
        found = []
        while data:
            kind, _, stream, length = HEADER.unpack(data[: HEADER.size])
            found.append((kind, stream, data[HEADER.size : HEADER.size + length]))
            data = data[HEADER.size + length :]
        return found

    def heard(self) -> list[tuple[int, bytes]]:
        return [(kind, payload) for kind, _, payload in self.frames()]

    def answer_pings(self) -> None:
        self.say(*(frame(PONG, 0, payload) for kind, payload in self.heard() if kind == PING))


class Way:
    """A transport."""

    servers = ()

    def open(self, command: str, stopped: Callable[[], bool] = lambda: False) -> Any: ...
    def joined(self) -> None: ...
    def close(self) -> None: ...


class Agent:
    """The joiner: what comes of each further attempt to reach the agent is what the test puts there."""

    def __init__(self) -> None:
        self.outcomes: list[Stream | Exception] = []
        self.attempts = 0
        self.stopped: list[Callable[[], bool]] = []

    def transport(self) -> Any:
        return Way()

    def rejoin(self, transport: Any, deadline: float, stopped: Callable[[], bool]) -> Any:
        self.attempts += 1
        self.stopped.append(stopped)
        outcome = self.outcomes.pop(0) if self.outcomes else sky.HostLost("no route", host="node1")
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class Bench:
    """A connection and all that it meets."""

    def __init__(self, lease: float = 60) -> None:
        self.clock, self.agent, self.listener, self.reader = Clock(), Agent(), Listener(), HandReader()
        self.timing = Timing(lease=lease, heartbeat_timeout=10, heartbeat=1, suspect_after=3, clock=self.clock)
        self.connection = Connection(HOST, self.listener, self.reader, self.agent, self.timing)
        self.stream = Stream()

    @property
    def state(self) -> State:
        return self.connection.state

    def begin(self) -> None:
        self.connection.begin((self.stream, Way()))  # type: ignore[arg-type]

    def open(self) -> None:
        self.begin()
        self.stream.hello()
        self.reader.turn()
        self.stream.heard()

    def pass_time(self, seconds: float, *, answering: bool = False) -> None:
        """A tick each second, and a step of the reconnector where there is one."""
        for _ in range(int(seconds)):
            self.clock.now += 1
            run(self.connection.on_tick(self.clock.now))
            if answering:
                self.stream.answer_pings()
            self.step()

    def step(self) -> bool:
        self.reader.turn()
        reconnector = self.connection._reconnector
        goes_on = reconnector is not None and reconnector.step(self.clock.now)
        self.reader.turn()
        return goes_on

    def break_stream(self) -> None:
        self.stream.agent.shutdown(socket.SHUT_WR)
        self.reader.turn()

    def end(self) -> None:
        """Leaves no descriptor behind."""
        self.reader.discard(self.connection)
        if self.reader._selector is not None:
            self.reader._is_over()
        for stream in Stream.made:
            stream.ours.close()
            stream.agent.close()
        Stream.made.clear()

    def request(self) -> list[object]:
        """Sends something; the list gets the answer or the failure."""
        found: list[object] = []
        self.connection.send(
            messages.Has(names=[]), answer=lambda message, _: found.append(message), failure=found.append
        )
        return found


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts are made at once, and a reconnector takes its steps when the test says so."""
    monkeypatch.setattr(reconnect, "spawn", lambda work, name: work())
    monkeypatch.setattr(Reconnector, "start", lambda self: None)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.end()


# ---- opening


def test_new_connecting_open(bench: Bench) -> None:
    assert bench.state is State.NEW
    bench.begin()
    assert bench.state is State.CONNECTING
    assert [kind for kind, _ in bench.stream.heard()] == [HELLO]
    bench.stream.hello()
    bench.reader.turn()
    assert bench.state is State.OPEN
    assert bench.connection.agent is not None


def test_connecting_lost_when_the_stream_ends_before_hello(bench: Bench) -> None:
    bench.begin()
    bench.stream.why = sky.HostUnfit("no python", host="node1")
    bench.break_stream()
    assert bench.state is State.LOST
    assert bench.listener.told == []  # who opens it raises: nobody had it
    bench.connection.explain()
    assert bench.connection.ended is bench.stream.why


def test_connecting_is_not_suspected_however_long_it_takes(bench: Bench) -> None:
    bench.begin()
    bench.pass_time(29)
    assert bench.state is State.CONNECTING


def test_connecting_lost_when_the_hello_is_rubbish(bench: Bench) -> None:
    bench.begin()
    bench.stream.say(frame(HELLO, 0, b"rubbish"))
    bench.reader.turn()
    assert bench.state is State.LOST
    assert isinstance(bench.connection.ended, sky.ProtocolError)


def test_new_closed(bench: Bench) -> None:
    bench.connection.close(1)
    assert bench.state is State.CLOSED
    with pytest.raises(sky.CallCancelled, match="closed"):
        bench.request()


def test_a_stream_that_comes_after_close_is_not_connected(bench: Bench) -> None:
    bench.connection.leave()
    bench.begin()
    assert bench.state is State.CLOSING
    bench.connection.close(0)
    assert bench.state is State.CLOSED
    assert bench.stream.closed


# ---- heartbeats


def test_open_stays_open_while_heartbeats_are_answered(bench: Bench) -> None:
    bench.open()
    bench.pass_time(30, answering=True)
    assert bench.state is State.OPEN
    assert bench.listener.told == []


def test_open_suspect_when_heartbeats_are_missed(bench: Bench) -> None:
    bench.open()
    bench.pass_time(3)
    assert bench.state is State.OPEN
    bench.pass_time(1)
    assert bench.state is State.SUSPECT
    assert bench.listener.told == ["apart: no heartbeat"]
    assert bench.agent.attempts == 1


def test_a_program_that_stood_still_suspects_nobody(bench: Bench) -> None:
    bench.open()
    bench.clock.now += 30  # stopped with Ctrl-Z, or a machine that swaps
    run(bench.connection.on_tick(bench.clock.now))
    assert bench.state is State.OPEN
    bench.pass_time(4)
    assert bench.state is State.SUSPECT  # it has asked since, and nothing came


def test_suspect_open_when_the_old_stream_answers(bench: Bench) -> None:
    bench.open()
    bench.pass_time(5)
    assert bench.state is State.SUSPECT
    bench.stream.answer_pings()
    bench.reader.turn()
    assert not bench.step()
    assert bench.state is State.OPEN
    assert bench.listener.told[-1] == "together after 5"


def test_what_was_sent_before_the_suspicion_proves_nothing(bench: Bench) -> None:
    bench.open()
    bench.pass_time(3)
    sent = bench.stream.heard()
    bench.pass_time(2)
    bench.stream.say(*(frame(PONG, 0, payload) for kind, payload in sent if kind == PING))
    bench.reader.turn()
    assert bench.step()
    assert bench.state is State.SUSPECT


# ---- streams that break


def test_open_suspect_open_with_another_stream(bench: Bench) -> None:
    bench.open()
    found = bench.request()
    bench.break_stream()
    assert bench.state is State.SUSPECT
    other = Stream()
    bench.agent.outcomes = [other]
    assert bench.step()
    assert bench.step()
    assert bench.state is State.SUSPECT  # the agent has not said hello on it
    other.hello(received=0)
    bench.reader.turn()
    assert not bench.step()
    assert bench.state is State.OPEN
    assert bench.listener.told == ["apart: the connection ended", "together after 0"]
    assert bench.stream.closed
    kinds = [kind for kind, _ in other.heard()]
    assert kinds[0] == HELLO
    assert len(kinds) > 1, "what the agent has not received is sent again"
    assert found == []


def test_a_stream_that_brings_no_hello_is_followed_by_another(bench: Bench) -> None:
    bench.open()
    bench.break_stream()
    first, second = Stream(), Stream()
    bench.agent.outcomes = [first]
    bench.step()
    bench.step()
    bench.clock.now += 2
    bench.agent.outcomes = [second]
    bench.step()
    assert bench.agent.attempts == 1
    bench.clock.now += 2  # more than it takes to suspect it
    bench.step()
    bench.step()
    assert bench.agent.attempts == 2
    second.hello()
    bench.reader.turn()
    bench.step()
    assert bench.state is State.OPEN
    assert first.closed


def test_an_attempt_that_this_machine_cannot_make_is_made_again(bench: Bench) -> None:
    bench.open()
    bench.break_stream()
    bench.stream = Stream()
    bench.agent.outcomes = [BlockingIOError(errno.EAGAIN, "no process can be started"), bench.stream]
    bench.pass_time(3)
    bench.stream.hello()
    bench.pass_time(1)
    assert bench.state is State.OPEN


@pytest.mark.parametrize("refused", ["skyfab-reconnect", "skyfab-attempt", "skyfab-close"])
def test_an_outage_in_which_a_thread_cannot_be_started_ends(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    asked: list[str] = []

    def begin(name: str) -> None:
        asked.append(name)
        if asked.count(name) == 1 and name == refused:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", lambda thread: begin(thread.name))
    monkeypatch.setattr(reconnect, "spawn", lambda work, name: (begin(name), work()))
    monkeypatch.setattr(Reconnector, "start", START)
    bench.open()
    bench.break_stream()
    broken, bench.stream = bench.stream, Stream()
    bench.agent.outcomes = [bench.stream]
    bench.pass_time(3)
    bench.stream.hello()
    bench.pass_time(1)
    assert bench.state is State.OPEN
    assert broken.closed
    assert asked.count("skyfab-reconnect") > 1, "it is started again, or runs already"


def test_attempts_are_limited_and_the_first_that_succeeds_is_used(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest is abandoned for a new one; streams that are not used are closed."""
    works: list[Callable[[], None]] = []
    bench.open()
    monkeypatch.setattr(reconnect, "spawn", lambda work, name: works.append(work))
    bench.break_stream()
    streams = [Stream() for _ in range(reconnect.MOST_ATTEMPTS + 1)]
    bench.agent.outcomes = list(streams)
    while len([work for work in works if "_Attempt" in work.__qualname__]) < len(streams):
        bench.clock.now += 1
        bench.step()
    for work in works:
        work()
    bench.step()
    abandoned, used, *others = streams
    assert bench.connection.stream is used  # type: ignore[comparison-overlap]
    assert abandoned.closed
    assert all(other.closed for other in others)
    assert not used.closed
    assert bench.agent.stopped[0]()


# ---- the host is lost


def lost_because(bench: Bench) -> str:
    assert bench.state is State.LOST
    assert bench.listener.told[-1].startswith("lost: ")
    assert isinstance(bench.connection.ended, sky.HostLost)
    return bench.connection.ended.message


def test_suspect_lost_after_its_lease(bench: Bench) -> None:
    bench.open()
    found = bench.request()
    bench.break_stream()
    bench.pass_time(60)
    assert bench.state is State.SUSPECT
    bench.pass_time(1)
    assert "lease of 60 s" in lost_because(bench)
    assert list(map(repr, found)) == [repr(bench.connection.ended)]


@pytest.mark.parametrize("useful", [False, True])
def test_streams_that_end_before_they_bring_anything_do_not_prolong_the_lease(bench: Bench, useful: bool) -> None:
    bench.open()
    found = bench.request()
    for _ in range(100):
        bench.break_stream()
        bench.agent.outcomes = [Stream()]
        bench.stream = bench.agent.outcomes[0]
        bench.step()
        bench.step()
        if bench.state is State.LOST:
            break
        bench.stream.hello()
        if useful:
            head = filled(messages.Exited).encode()
            bench.stream.say(frame(HEAD, 2, head, len(head)))
        bench.reader.turn()
        bench.step()
        bench.pass_time(1)
    if useful:
        assert bench.state is State.OPEN
    else:
        assert "lease of 60 s" in lost_because(bench)
        assert list(map(repr, found)) == [repr(bench.connection.ended)]


def test_suspect_lost_sooner_when_other_hosts_respond(bench: Bench) -> None:
    bench.open()
    bench.listener.others = True
    bench.break_stream()
    bench.pass_time(10)
    assert bench.state is State.SUSPECT
    bench.pass_time(1)
    assert lost_because(bench) == "no heartbeat for 10 s while other hosts respond"
    assert isinstance(bench.connection.ended, sky.HostLost)
    assert str(bench.connection.ended.hint).startswith("skyfab doctor --hosts=")


def test_time_without_a_network_does_not_count_against_one_host(bench: Bench) -> None:
    bench.open()
    bench.break_stream()
    bench.pass_time(30)  # nobody responds: it is this machine's network
    bench.listener.others = True
    bench.pass_time(9)
    assert bench.state is State.SUSPECT
    bench.pass_time(3)
    assert "while other hosts respond" in lost_because(bench)


def test_suspect_lost_when_its_agent_is_not_there(bench: Bench) -> None:
    bench.open()
    bench.break_stream()
    bench.agent.outcomes = [sky.HostUnfit("no such agent", host="node1")]
    bench.step()
    bench.step()
    assert "was restarted" in lost_because(bench)


def test_open_lost_at_once_when_the_link_says_that_the_agent_is_gone(bench: Bench) -> None:
    bench.open()
    bench.stream.why = AgentGone("its agent is gone", host="node1")
    bench.break_stream()
    bench.step()
    assert "its agent is gone" in lost_because(bench)
    assert bench.agent.attempts == 0
    assert not any(told.startswith("apart") for told in bench.listener.told)


def test_open_lost_at_once_without_a_lease() -> None:
    bench = Bench(lease=0)
    bench.open()
    bench.break_stream()
    bench.step()
    assert bench.state is State.LOST
    assert bench.agent.attempts == 0
    bench.end()


def test_open_lost_when_the_host_breaks_the_protocol(bench: Bench) -> None:
    bench.open()
    found = bench.request()
    bench.stream.heard()
    bench.stream.say(frame(PING))
    bench.stream.hello()
    bench.reader.turn()
    lost_because(bench)
    assert isinstance(found[0], sky.HostLost)
    assert isinstance(found[0].__cause__, sky.ProtocolError)
    assert bench.stream.heard() == [], "nothing more is sent"


def test_open_lost_when_handling_what_came_raises(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.open()
    found = bench.request()

    def fail(*_: object) -> bool:
        raise RuntimeError("a defect")

    monkeypatch.setattr(bench.connection._mux, "read", fail)
    bench.stream.say(frame(PONG))
    bench.reader.turn()
    assert "RuntimeError" in lost_because(bench)
    assert list(map(repr, found)) == [repr(bench.connection.ended)]


def test_a_lost_connection_stays_lost(bench: Bench) -> None:
    bench.open()
    bench.stream.hello()
    bench.reader.turn()
    told = list(bench.listener.told)
    bench.connection.close(0)
    bench.pass_time(100)
    assert bench.state is State.LOST
    assert bench.listener.told == told
    assert bench.stream.closed


# ---- closing


@pytest.mark.parametrize("answer", ["end of file", "goodbye"])
def test_open_closing_closed(bench: Bench, answer: str) -> None:
    """What a login script leaves running may keep the stream open for ever."""
    bench.open()
    found = bench.request()
    bench.connection.leave()
    assert bench.state is State.CLOSING
    bench.stream.heard()
    closing = threading.Thread(target=bench.connection.close, args=(30,))
    closing.start()
    bench.stream.agent.setblocking(True)
    bench.stream.agent.settimeout(10)
    assert BYE in [kind for kind, _ in bench.stream.heard()]
    if answer == "goodbye":
        bench.stream.say(frame(BYE, 0, b"done"))
    else:
        bench.stream.agent.shutdown(socket.SHUT_WR)
    closing.join(10)
    assert not closing.is_alive()
    assert bench.state is State.CLOSED
    assert bench.listener.told == []
    assert isinstance(found[0], sky.CallCancelled)
    assert "closed" in found[0].message


def test_closing_closed_when_no_answer_comes(bench: Bench) -> None:
    bench.open()
    bench.connection.leave()
    bench.connection._close_by = bench.clock.now + 5
    bench.pass_time(5)
    assert bench.state is State.CLOSING
    bench.pass_time(1)
    assert bench.state is State.CLOSED


def test_suspect_closed(bench: Bench) -> None:
    bench.open()
    found = bench.request()
    bench.break_stream()
    reconnector = bench.connection._reconnector
    bench.connection.close(5)  # at once: there is nobody to say goodbye to
    assert bench.state is State.CLOSED
    assert len(found) == 1
    assert reconnector is not None
    assert not reconnector.step(bench.clock.now)
    assert bench.listener.told == ["apart: the connection ended"]


def test_a_stream_that_was_offered_when_it_closed_is_closed(bench: Bench) -> None:
    bench.open()
    bench.break_stream()
    other = Stream()
    reconnector = bench.connection._reconnector
    assert reconnector is not None
    reconnector.candidate = (other, Way())  # type: ignore[assignment]
    bench.connection.close(0)
    reconnector._run()
    assert other.closed


# ---- detaching


def test_open_detached_closed(bench: Bench) -> None:
    bench.open()
    source = bench.stream.fileno()
    assert source in bench.reader._owners
    bench.connection.detach()
    assert bench.state is State.DETACHED
    assert bench.stream.closed
    assert source not in bench.reader._owners
    assert BYE not in [kind for kind, _ in bench.stream.heard()]
    bench.connection.close(5)
    assert bench.state is State.CLOSED
    assert bench.listener.told == []


def test_suspect_detached_when_the_agent_has_received_everything(bench: Bench) -> None:
    bench.open()
    bench.break_stream()
    bench.connection.detach()
    assert bench.state is State.DETACHED


# ---- sending and receiving


def test_what_cannot_be_sent_fails_once(bench: Bench) -> None:
    bench.open()
    found: list[object] = []
    with pytest.raises(sky.ProtocolError):
        bench.connection.send(bytes(LIMIT + 1), answer=lambda message, _: found.append(message), failure=found.append)
    bench.connection.close(0)
    assert found == []


@pytest.mark.parametrize("urgent", [False, True])
def test_what_is_said_without_a_stream_follows_on_the_next(bench: Bench, urgent: bool) -> None:
    bench.open()
    bench.break_stream()
    bench.connection.send(messages.Has(names=[]), urgent=urgent)
    other = Stream()
    bench.agent.outcomes = [other]
    bench.step()
    bench.step()
    other.hello()
    bench.reader.turn()
    assert HEAD in [kind for kind, _ in other.heard()]


@pytest.mark.parametrize("urgent", [False, True])
@pytest.mark.parametrize("has_sink", [True, False])
def test_what_finds_no_room_follows_when_there_is_some(bench: Bench, urgent: bool, has_sink: bool) -> None:
    bench.stream.sink = lambda: sink.fileno() if has_sink else None  # type: ignore[method-assign]
    bench.open()
    with socket.socket(fileno=os.dup(bench.stream.fileno())) as sink:
        full = True
        send = bench.stream.send

        def maybe(buffers: Sequence[bytes | memoryview]) -> int:
            if full:
                raise BlockingIOError
            return send(buffers)

        bench.stream.send = maybe  # type: ignore[method-assign]
        bench.connection.send(messages.Has(names=[]), urgent=urgent)
        assert (bench.connection._sink >= 0) is has_sink
        bench.reader.turn()
        assert bench.stream.heard() == []
        full = False
        time.sleep(0.005)
        bench.reader.turn()
        assert HEAD in [kind for kind, _ in bench.stream.heard()]
        assert bench.connection._sink == -1
        bench.reader.discard(bench.connection)


def test_a_stream_that_cannot_be_written_is_explained_by_reading_it(bench: Bench) -> None:
    bench.open()

    def broken(buffers: Sequence[bytes | memoryview]) -> int:
        raise BrokenPipeError

    bench.stream.send = broken  # type: ignore[method-assign]
    bench.connection.send(messages.Has(names=[]))
    assert bench.state is State.OPEN
    bench.break_stream()
    assert bench.state is State.SUSPECT


def test_what_a_program_says_on_stderr_is_read_until_it_ends(bench: Bench) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        said: list[bytes] = []
        bench.stream.stderr = lambda: None if said[-1:] == [b""] else ours.fileno()  # type: ignore[method-assign]
        bench.stream.drain = lambda: said.append(ours.recv(100))  # type: ignore[method-assign]
        bench.open()
        theirs.send(b"warning")
        bench.reader.turn()
        assert said == [b"warning"]
        theirs.close()
        bench.reader.turn()
        assert said == [b"warning", b""], "and it is not watched any more"
        assert bench.connection._stderr == -1


def test_a_stream_that_raises_when_it_is_read_is_broken(bench: Bench) -> None:
    bench.open()

    def reset(view: memoryview) -> int:
        raise ConnectionResetError("reset")

    bench.stream.recv_into = reset  # type: ignore[method-assign]
    bench.stream.say(frame(PONG))
    bench.reader.turn()
    bench.step()
    assert bench.listener.told == ["apart: the connection broke: reset"]
