"""The tether: the stream to a host's agent, whichever one that is just now, read and written.

Whoever waits for an answer reads, see `turns`. When the stream breaks or falls silent, a reunion finds another one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from skyfab.errors import HostLost, SkyfabError
from skyfab.inbox import Answer, Exchange, Failure, Inbox, Listener, Reply
from skyfab.interrupts import INTERRUPTS, MAIN
from skyfab.inventory import Host
from skyfab.protocol import VERSION
from skyfab.protocol.frames import HEAD, HEADER, Buffer
from skyfab.protocol.messages import AgentHello, ClientHello, Message
from skyfab.reunion import DOUBT, Reunion
from skyfab.revival import Join
from skyfab.transport.base import Stream, Transport
from skyfab.turns import Turns
from skyfab.wire import Wire

PING: Final = 1.0
"""Seconds between signs of life."""
_LAST_STREAM: Final = 2**32 - 1
GONE: Final = "agent is gone"
"""What the link says of an agent that it does not find."""


class Tether:
    """The way to one agent and back. Thread-safe."""

    def __init__(
        self,
        host: Host,
        listener: Listener,
        *,
        lease: float,
        silence: float,
        reach: Callable[[], Transport],
        join: Join,
    ) -> None:
        self._host = host
        self._lease = lease
        self._pace = min(PING, lease / 4) if lease else PING
        self._inbox = Inbox(host.name, listener)
        self._mux = self._inbox.mux
        self._lock = threading.Lock()
        self._ended: Exception | None = None
        self._farewell = False
        self._until = float("inf")
        """When the farewell is over, heard or not."""
        self._pinged = self._looked = self._woke = 0.0
        self._next_stream = 1
        self._wire = Wire()
        self._turns = Turns(self.pump, self._wire.poke)
        self._reunion = Reunion(
            self._wire,
            self._inbox,
            self._lock,
            listener,
            host=host.name,
            lease=lease,
            silence=silence,
            over=lambda: self._farewell or self._ended is not None,
            reach=reach,
            join=join,
        )

    @property
    def agent(self) -> AgentHello | None:
        """What the host said of itself, once it has."""
        return self._inbox.agent

    @property
    def ended(self) -> Exception | None:
        """Why it is over."""
        return self._ended

    @property
    def heard(self) -> float:
        """When the host last said something; it says something every few seconds."""
        return self._reunion.heard

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes sent and received so far."""
        return self._mux.bytes_out, self._mux.bytes_in

    @property
    def is_leaving(self) -> bool:
        """This side wants it to end."""
        return self._farewell

    # ---- the beginning and the end

    def begin_with(self, stream: Stream, transport: Transport) -> None:
        """The first stream, on which the agent is about to say hello."""
        self._mux.attach(self._hello())
        self._wire.take(stream, transport)
        with self._lock:
            self._read()  # some of it may have come together with the link's answer

    def start(self, name: str) -> None:
        """From now on somebody always reads."""
        self._turns.start(name)

    def leave(self) -> None:
        """It is to end: whoever waits looks up."""
        self._farewell = True
        self.poke()

    def close(self, patience: float) -> None:
        """Says goodbye, and waits for the answer so long."""
        self._farewell = True
        self._until = time.monotonic() + patience
        with self._lock:
            if self._wire.stream is not None and self._ended is None:
                self._mux.bye()
                self._flush()
        self._wire.poke()
        self._turns.join(patience + 1)
        with self._turns.held:
            self._wire.close()
            self._reunion.close()

    def abandon(self) -> None:
        """Waits until the agent has heard everything, and lets go of it without a goodbye. Raises HostLost."""
        with self._lock:
            self._mux.ping()
        if not self._turns.wait(self._is_heard) and self._ended is not None:
            raise self._ended
        with self._lock:
            self._farewell = True
            self._wire.let_go()

    def _hello(self) -> bytes:
        """How far this side has heard; it opens every stream."""
        return ClientHello(
            protocol=VERSION,
            received=self._mux.received,
            lease=self._lease,
            name=self._host.name,
            local=self._host.transport == "local",
        ).encode()

    def _is_heard(self) -> bool:
        with self._lock:
            if not self._mux.is_heard and time.monotonic() - self._pinged > 0.05:
                self._pinged = time.monotonic()
                self._mux.ping()
            return self._mux.is_heard

    # ---- speaking

    def send(
        self,
        message: Message | bytes,
        parts: Sequence[Buffer] = (),
        *,
        answer: Answer | None = None,
        failure: Failure | None = None,
        seat: str | None = None,
        urgent: bool = False,
    ) -> int:
        """Sends a message. `answer` or `failure` is called once, on whatever thread reads.

        With `seat`, what the process in it has written so far is shown before the answer. Returns the stream's number.
        Raises HostLost when the host is gone.
        """
        head = message if isinstance(message, bytes) else message.encode()
        with self._lock:
            if self._ended is not None:
                raise self._ended
            stream = self._new_stream()
            if answer is not None:
                self._inbox.exchanges[stream] = Exchange(answer, failure or _ignore, seat)
            drained = self._say(stream, head, parts, urgent=urgent)
        if not drained:
            self._wire.poke()
        return stream

    def _new_stream(self) -> int:
        """A number for the next message: odd, and after the last one of 32 bits again those that are not in use."""
        stream = self._next_stream
        while stream in self._inbox.exchanges:
            stream = stream + 2 if stream < _LAST_STREAM else 1
        self._next_stream = stream + 2 if stream < _LAST_STREAM else 1
        return stream

    def begin(self, head: bytes, data: bytes, seat: str) -> Reply:
        """Sends a small message whose answer this thread will `await_reply`. Raises HostLost."""
        with self._lock:
            if self._ended is not None:
                raise self._ended
            stream = self._new_stream()
            reply = self._inbox.exchanges[stream] = Reply(stream, seat)
            wire = self._wire.stream
            if wire is None:
                self._mux.send(stream, head, (data,))
                return reply
            whole = HEADER.pack(HEAD, len(head), stream, len(head) + len(data)) + head + data
            try:
                drained = self._mux.send_frame(whole, wire.send)
            except OSError:
                drained = True  # the reading side finds out why
        if not drained:
            self._wire.poke()
        return reply

    def await_reply(self, reply: Reply) -> None:
        """Raises HostLost when the host is gone first."""
        self._turns.wait(reply.is_there)
        if reply.error is not None:
            raise reply.error

    def poke(self) -> None:
        """Makes whoever waits look again."""
        self._wire.poke()

    def wait(self, done: Callable[[], bool], timeout: float | None = None) -> bool:
        """Reads until `done()`, or lets another caller do so. False: time is up."""
        return self._turns.wait(done, timeout)

    # ---- reading and writing

    def pump(self, timeout: float | None) -> None:
        """Waits for the stream once, reads and writes what it can, and hands out what has arrived."""
        if self._reunion.fresh is not None:
            self._adopt()
        wait = self._pace if timeout is None else min(timeout, self._pace)
        if self._farewell:
            wait = min(wait, 0.5)
        with INTERRUPTS:
            if threading.get_ident() == MAIN:
                depth = INTERRUPTS.pause()  # here alone may it be interrupted: nothing has been read yet
                try:
                    ready = self._wire.wait(wait, self._mux.has_output)
                finally:
                    INTERRUPTS.resume(depth)
            else:
                ready = self._wire.wait(wait, self._mux.has_output)
            after = self._take_in(ready)
            if after:
                self._turns.call(after)

    def _take_in(self, ready: list[tuple[int, int]]) -> list[Callable[[], None]] | None:
        """Reads and writes what it can; returns what others are to be told."""
        wire = self._wire
        try:
            with self._lock:
                heard = False
                for fd, _ in ready:
                    if fd == wire.source:
                        heard = True
                        self._read()
                    elif fd == wire.waker:
                        os.read(fd, 4096)
                    elif fd == wire.stderr:
                        wire.drain()
                    else:
                        wire.forget(fd)
                if self._ended is None:
                    if not heard or self._farewell or self._mux.heard - self._pinged > self._pace:
                        self._keep_alive()
                    if self._mux.has_output:
                        self._flush()
                return self._inbox.take() if self._inbox.after else None
        except BaseException:
            self._torn()
            raise

    def _torn(self) -> None:
        """Something broke in the middle of reading: nobody knows how much is lost."""
        with self._lock:
            self._finish(HostLost("interrupted while it was answering", host=self._host.name))
            after = self._inbox.take()
        self._turns.call(after)

    def _read(self) -> None:
        stream = self._wire.stream
        assert stream is not None
        try:
            if not self._mux.read(stream.recv_into):
                self._break(None)
        except BlockingIOError:
            pass
        except (OSError, EOFError) as error:
            self._break(HostLost(f"the connection broke: {error}", host=self._host.name))
        except SkyfabError as error:
            error.host = error.host or self._host.name
            self._finish(error)

    def _say(self, stream: int, head: bytes, parts: Sequence[Buffer], *, urgent: bool = False) -> bool:
        wire = self._wire.stream
        if urgent or wire is None:
            self._mux.send(stream, head, parts, urgent=urgent)
            return self._flush()
        try:
            return self._mux.send_now(stream, head, parts, wire.send)
        except OSError:
            return True  # the reading side finds out why

    def _flush(self) -> bool:
        wire = self._wire.stream
        if wire is None:
            return True
        try:
            return self._mux.flush(wire.send)
        except OSError:
            return True  # the reading side finds out why

    def _keep_alive(self) -> None:
        now = time.monotonic()
        if now - max(self._looked, self._mux.heard) > max(2 * self._pace, 1.0):
            self._woke = now  # this program itself stood still, and has asked for nothing
        self._looked = now
        if self._reunion.verdict is not None:
            self._finish(self._reunion.verdict)
        elif self._farewell and (now > self._until or self._wire.stream is None):
            self._finish(None)
        elif now - self._pinged > self._pace:
            self._pinged = now
            self._mux.ping()
        if now - max(self._mux.heard, self._woke) > DOUBT and self._inbox.agent is not None:
            self._reunion.doubt(f"not a word for {DOUBT:.0f} s")

    def _break(self, error: Exception | None) -> None:
        """The stream has ended, and not because somebody wanted it to: another may take its place."""
        if self._ended is not None:
            return
        if self._farewell or self._inbox.agent is None:
            self._finish(error)
            return
        assert self._wire.stream is not None
        error = error or self._wire.stream.explain()
        if GONE in str(error) or self._lease <= 0:
            self._finish(error)
            return
        self._wire.let_go()
        self._reunion.doubt(error.message if isinstance(error, SkyfabError) else str(error))

    def _adopt(self) -> None:
        """Goes on with a new stream: both sides say how far they have heard, and the rest is said again."""
        with self._lock:
            self._mux.attach(self._hello())
            self._reunion.adopt()
            self._read()  # some of it may have come together with the link's answer
            self._flush()

    # ---- the end

    def _finish(self, error: Exception | None) -> None:
        """It is over: everybody who waits is told."""
        if self._ended is not None:
            return
        if error is None and not self._farewell and self._wire.stream is not None:
            error = self._wire.stream.explain()
        self._ended = error or HostLost("the pool is closed", host=self._host.name)
        self._turns.over = True
        lost = None
        if not self._farewell and self._inbox.agent is not None:
            lost = self._ended = _as_lost(self._ended, self._host)
        self._inbox.end(self._ended, lost=lost)


def _as_lost(error: Exception, host: Host) -> HostLost:
    """It was there: whatever its connection says of its end, that is over."""
    if isinstance(error, HostLost):
        return error
    lost = HostLost(str(error), host=host.name)
    if isinstance(error, SkyfabError):
        lost = HostLost(error.message, host=host.name, hint=error.hint)
    lost.__cause__ = error
    return lost


def _ignore(error: Exception) -> None:
    """For requests whose failure nobody waits for."""
