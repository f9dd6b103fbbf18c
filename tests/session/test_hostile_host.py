"""A session with a host that lies: it cannot hang this side, fill its memory, or raise anything but a typed error.

The host is a puppet at the seam between session and transport: one end of a socketpair that a test writes to by hand.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from stage.fakes import Listener
from stage.messages import filled
from stage.spot import until
from stage.threads import begin

import skyfab as sky
from skyfab.inventory.host import Host
from skyfab.protocol import VERSION, messages
from skyfab.protocol.blobs import name_of
from skyfab.protocol.frames import (
    BYE,
    COUNT,
    CREDIT,
    DATA,
    HEAD,
    HEADER,
    HELLO,
    LIMIT,
    PING,
    frame,
)
from skyfab.session.bootstrap import Bootstrap, local_python
from skyfab.session.bundle import bundle
from skyfab.session.reader import SharedReader
from skyfab.session.session import Session
from skyfab.session.timing import Timing

SESSION = "0123456789abcdef"
NAME = name_of(b"x")
ABOUT = {"address": "10.0.0.1", "gpus": 1}


class Stream:
    """Our end of the socketpair, as a transport's stream."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        end.setblocking(False)
        self._sink = os.dup(end.fileno())

    def fileno(self) -> int:
        return self._socket.fileno()

    def sink(self) -> int | None:
        return self._sink

    def stderr(self) -> int | None:
        return None

    def drain(self) -> None: ...

    def recv_into(self, view: memoryview) -> int:
        return self._socket.recv_into(view)

    def send(self, buffers: Sequence[bytes | memoryview]) -> int:
        return self._socket.sendmsg(buffers)

    def explain(self) -> Exception:
        return sky.HostLost("the connection ended", host="node")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        os.close(self._sink)


class Puppet:
    """A transport whose host says what it is told to."""

    def __init__(self) -> None:
        self._ours, self.host = socket.socketpair()
        self.host.sendall(f"=skyfab={SESSION}=link\n".encode())

    def open(self, command: str, stopped: Callable[[], bool] = lambda: False) -> Stream:
        return Stream(self._ours)

    servers = ()
    is_closed = False

    def joined(self) -> None: ...
    def close(self) -> None:
        self.is_closed = True

    def say(self, data: bytes) -> None:
        """Until it is sent, or the other side has hung up."""
        with contextlib.suppress(OSError):
            self.host.sendall(data)


def hello(**changes: Any) -> bytes:
    about = {"protocol": VERSION, "python": local_python(), **ABOUT, **changes}
    return frame(HELLO, 0, filled(messages.AgentHello, **about).encode())


@contextlib.contextmanager
def prepared(lease: float = 15) -> Iterator[tuple[Session, Puppet, Listener]]:
    host = Host(name="node")
    puppet, listener = Puppet(), Listener()
    made = Bootstrap(host=host, session=SESSION, bundle=bundle(), python=local_python())
    session = Session(made, lambda: puppet, listener, SharedReader(), Timing(lease=lease))
    try:
        yield session, puppet, listener
    finally:
        puppet.host.close()
        began = time.monotonic()
        session.close()
        assert time.monotonic() - began < 15


@contextlib.contextmanager
def opened(lease: float = 15) -> Iterator[tuple[Session, Puppet, Listener]]:
    """A session with a host that has introduced itself properly, and then does as the test says."""
    with prepared(lease) as (session, puppet, listener):
        puppet.say(hello())
        session.open()
        yield session, puppet, listener


def outcome(session: Session, puppet: Puppet, answer: bytes, message: messages.Message | None = None) -> Any:
    """Asks the host something, lets it answer with these bytes, and hang up; the reply, or what was raised."""
    asked = begin(lambda: session.ask(message or messages.Has(names=[])))
    while not session.connection.replies.pending and not asked.done():
        time.sleep(0.001)
    puppet.say(answer)
    with contextlib.suppress(OSError):
        puppet.host.shutdown(socket.SHUT_WR)
    return asked.exception(30) or asked.result()


def head(stream: int, message: messages.Message | bytes, data: bytes = b"", *, large: bool = False) -> bytes:
    """A message as the wire carries it."""
    content = message if isinstance(message, bytes) else message.encode()
    return frame(HEAD, stream, content + data, 0 if large else len(content))


# ---- the introduction


def test_a_proper_host_is_heard() -> None:
    """Else the tests below prove nothing."""
    with opened() as (session, puppet, _):
        assert not session.has_ended
        assert min(session.moved) > 0
        assert outcome(session, puppet, head(1, messages.Missing(names=["a"]))) == messages.Missing(names=["a"])
    assert session.has_ended
    with opened() as (session, puppet, _):
        error = outcome(session, puppet, head(1, messages.Failed(text="its disk is full", hint="free some")))
        assert isinstance(error, sky.HostUnfit)
        assert str(error) == "node: its disk is full\nhint: free some"


@pytest.mark.parametrize(
    "said",
    [
        hello(protocol=VERSION + 1),
        hello(python="3.11; rm -rf /"),
        hello(received=1),
        frame(HELLO, 0, b""),
        frame(HELLO, 0, b"[" * 100_000),
        frame(HELLO, 0, messages.Done().encode()),
        frame(BYE, 0, b"no"),
        head(1, messages.Done()) + hello(),
        frame(DATA, 1, b"x") + hello(),
        HEADER.pack(HELLO, 0, 0, 2**60),
        b"Traceback (most recent call last):\n  File ...\n",
        b"",
    ],
    ids=lambda said: ascii(said[16:56]),
)
def test_a_host_that_does_not_introduce_itself_is_refused(said: bytes) -> None:
    """Versions are compared, and nonsense refused, before anything else is believed."""
    with prepared() as (session, puppet, _):
        puppet.say(said)
        puppet.host.shutdown(socket.SHUT_WR)
        with pytest.raises(sky.SkyfabError) as caught:
            session.open()
        assert len(str(caught.value)) < 1000
        assert isinstance(caught.value, sky.HostUnfit) or said == hello(received=1)


def test_a_host_that_says_nothing_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyfab.session.session.GOODBYE", 0.0)
    with prepared() as (session, _, _):
        opening = begin(session.open)
        until(lambda: session.connection.stream is not None)
        session.close()
        assert str(opening.exception(30)) == "node: the pool was closed"
        assert session.was_stopped
    monkeypatch.setattr("skyfab.session.bootstrap.CONNECT", 0.2)
    with prepared() as (session, _, _):
        with pytest.raises(sky.HostUnfit, match="its agent does not respond"):
            session.open()
        assert not session.was_stopped


def test_an_agent_that_was_given_up_is_ended() -> None:
    with opened() as (session, _, _):
        again = Puppet()
        session.transport = lambda: again
        session.end_agent(lambda: False)
        with again.host:
            assert again.host.recv(1000) == frame(BYE)
        assert again.is_closed


# ---- answers


ANSWERS = {
    "an exabyte": head(1, messages.Result(parts=[1 << 60]), large=True),
    "more than a number holds": head(1, b'{"op":"result","parts":[%d]}' % 10**40, large=True),
    "a negative size": head(1, b'{"op":"result","parts":[-5]}', large=True),
    "deep nesting": head(1, b'{"op":"result","parts":' + b"[" * 950 + b"]" * 950 + b"}"),
    "a blob of ours": head(1, messages.Result(parts=[[NAME, 3]])),
    "a file of ours": head(1, messages.Result(parts=[["../../etc/passwd", 3]])),
    "more data than announced": head(1, messages.Result(parts=[1]), b"xyz"),
    "too many parts": head(1, messages.Result(parts=[1] * 200_000), large=True),
    "data before its message": frame(DATA, 1, b"x"),
    "too much data": head(1, messages.Result(parts=[100_000]), large=True) + frame(DATA, 1, bytes(100_001)),
    "data across two parts": head(1, messages.Result(parts=[50_000, 50_000]), large=True)
    + frame(DATA, 1, bytes(60_000)),
    "half an answer": head(1, messages.Result(parts=[100_000]), large=True) + frame(DATA, 1, bytes(99_999)),
    "no JSON": head(1, b"\xff\xfe"),
    "an unknown message": head(1, b'{"op":"format_disk"}'),
    "a request": head(1, messages.Has(names=[])),
    "a hello as an answer": head(1, messages.ClientHello(protocol=VERSION, received=0, lease=1.0)),
    "a frame too large": HEADER.pack(DATA, 0, 1, LIMIT + 1),
    "an unknown kind": HEADER.pack(99, 0, 1, 0),
    "nothing": b"",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_bad_answer_is_a_typed_error_for_the_caller(answer: bytes) -> None:
    """At once, without a hang and without its weight in memory; whoever asks next is told too."""
    with opened(lease=3) as (session, puppet, _):
        tracemalloc.start()
        try:
            found = outcome(session, puppet, answer)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert isinstance(found, (sky.SkyfabError, messages.Message))
        if isinstance(found, messages.Message):  # understood, and of no use: the caller looks at what it got
            assert answer in (ANSWERS["a request"], ANSWERS["a hello as an answer"])
        else:
            assert len(str(found)) < 1000
        assert peak < 40_000_000


def test_a_wrong_answer_ends_the_host_and_not_the_program() -> None:
    """Everybody who waits is told, and the pool that the host is lost."""
    with opened() as (session, puppet, listener):
        errors: list[Exception] = []
        for _ in range(5):
            session.send(messages.Has(names=[]), answer=lambda *_: None, failure=errors.append)
        puppet.say(HEADER.pack(99, 0, 0, 0))
        session.wait(lambda: len(errors) == 5 and bool(listener.told), timeout=170)
        assert len(errors) == 5
        assert len(listener.told) == 1
        with pytest.raises(sky.SkyfabError):
            session.send(messages.Has(names=[]))


def test_an_answer_that_comes_twice_is_taken_once() -> None:
    with opened() as (session, puppet, _):
        replies: list[object] = []
        session.send(messages.Has(names=[]), answer=lambda reply, _: replies.append(reply))
        session.send(messages.Has(names=[]), answer=lambda reply, _: replies.append(reply))
        puppet.say(head(1, messages.Done(text="1")) * 2 + head(3, messages.Done(text="3")))
        assert session.wait(lambda: len(replies) == 2, timeout=170)
        assert replies == [messages.Done(text="1"), messages.Done(text="3")]


# ---- floods


def growth(session: Session, puppet: Puppet, flood: bytes, times: int) -> int:
    """How much memory this side holds after the flood; the host hears nothing of what is answered."""
    replies: list[object] = []
    session.send(messages.Has(names=[]), answer=lambda reply, _: replies.append(reply), failure=replies.append)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        writer = threading.Thread(target=puppet.say, args=(flood * times + head(1, messages.Done()),))
        writer.start()
        assert session.wait(lambda: bool(replies), timeout=170), "the flood is not through"
        with contextlib.suppress(OSError):
            puppet.host.shutdown(socket.SHUT_RDWR)
        writer.join()
        now, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return now - before


FLOODS = {
    "pings": frame(PING) * 4000,
    "credits": b"".join(frame(CREDIT, n, COUNT.pack(2**63)) for n in range(4000)),
    "goodbyes": frame(BYE, 0, b"x" * 100) * 1000,
    "answers nobody asked for": b"".join(head(2 * n + 1001, messages.Done()) for n in range(2000)),
    "exits of unknown workers": head(0, filled(messages.Exited, worker="x")) * 1000,
    "lines without end": head(2, filled(messages.Log, worker="0", fd=1), large=True)
    + frame(DATA, 2, b"x" * 100_000) * 10,
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_flood_costs_no_memory(flood: bytes) -> None:
    """However much comes, what is kept does not grow with it."""
    with opened() as (session, puppet, listener):
        listener.on_output = lambda *_: None  # type: ignore[method-assign]
        listener.on_exit = lambda *_: None  # type: ignore[method-assign]
        assert growth(session, puppet, flood, 5) < 1_000_000


def test_endless_new_streams_cost_no_memory() -> None:
    with opened() as (session, puppet, _):
        assert growth(session, puppet, b"".join(frame(DATA, n, b"x") for n in range(2, 40_002, 2)), 1) < 1_000_000


def logs(count: int, *, ended: bool) -> bytes:
    """So many processes announce what they will write, and perhaps end."""
    one = [
        head(2 * n, filled(messages.Log, worker=str(n), fd=1), large=True)
        + (head(0, filled(messages.Exited, worker=str(n))) if ended else b"")
        for n in range(1, count + 1)
    ]
    return b"".join(one)


@pytest.mark.timeout(30)
def test_a_host_that_announces_ever_more_processes_is_refused_before_it_costs_anything() -> None:
    """400 kB of announcements took more than half a minute, with the session's lock held."""
    with opened() as (session, puppet, _):
        errors: list[Exception] = []
        session.send(messages.Has(names=[]), answer=lambda *_: None, failure=errors.append)
        writer = threading.Thread(target=puppet.say, args=(logs(20_000, ended=False),))
        writer.start()
        session.wait(lambda: bool(errors))
        assert isinstance(errors[0].__cause__, sky.ProtocolError)
        puppet.host.shutdown(socket.SHUT_RDWR)
        writer.join()


@pytest.mark.timeout(30)
def test_processes_that_have_ended_are_not_remembered_for_ever() -> None:
    """A pool that has many gangs, one after the other, goes on."""
    with opened() as (session, puppet, _):
        assert outcome(session, puppet, logs(2_000, ended=True) + head(1, messages.Done())) == messages.Done()
        replies = session.connection.replies
        assert len(replies._output) == len(replies._streams) == len(replies._ended) <= 1024


def test_a_host_that_answers_and_never_acknowledges_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does not acknowledge is kept here, to be sent again: without a limit, that fills the memory."""
    monkeypatch.setattr("skyfab.protocol.mux.MOST_UNACKED", 500_000)
    with opened() as (session, puppet, _):
        reader = threading.Thread(target=lambda: [None for _ in iter(lambda: puppet.host.recv(65536), b"")])
        reader.start()
        said: list[object] = []
        errors: list[Exception] = []
        while not errors and len(said) < 1000:
            before = len(said)
            try:
                stream = session.send(
                    messages.Has(names=[NAME * 300]), answer=lambda *_: said.append(_), failure=errors.append
                )
            except sky.HostLost as error:
                errors.append(error)
                break
            puppet.say(head(stream, messages.Done()))
            session.wait(lambda: len(said) > before or bool(errors))  # noqa: B023
        assert isinstance(errors[0].__cause__, sky.ProtocolError)
        assert len(said) < 80  # some are sent while it is being given up
        puppet.host.shutdown(socket.SHUT_RDWR)
        reader.join()


@pytest.mark.slow
def test_a_host_that_never_reads_does_not_hang_the_client() -> None:
    """Sending goes on in the background, closing does not wait for it."""
    with opened() as (session, _, _):
        began = time.monotonic()
        for _ in range(3):
            session.send(messages.Blob(name=NAME, parts=[8_000_000]), [bytes(8_000_000)])
        assert time.monotonic() - began < 10
        session.close()
        assert time.monotonic() - began < 20
