"""A session: one agent on one host, as this machine talks to it.

One stream, many exchanges: requests and their answers, what processes write, and what happens to them. When the stream
breaks or falls silent it is replaced by another, to the same agent, and nothing is lost or said twice.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from skyfab.errors import HostLost, HostUnfit, ProtocolError, SkyfabError
from skyfab.inbox import Answer, Exchange, Failure, Inbox, Listener, Reply
from skyfab.interrupts import INTERRUPTS, MAIN
from skyfab.inventory import Host
from skyfab.launch import Launch, cannot_run, local_python, other_python
from skyfab.protocol import VERSION, messages
from skyfab.protocol.frames import BYE, HEAD, HEADER, frame
from skyfab.protocol.messages import AgentHello, ClientHello, Message
from skyfab.protocol.streams import Buffer
from skyfab.reunion import DOUBT, Reunion
from skyfab.transport.base import Stream, Transport
from skyfab.turns import Turns
from skyfab.wire import Wire, close

CONNECT: Final = 30.0
"""Seconds from the first byte to the agent's hello."""
GOODBYE: Final = 5.0
"""Seconds that a host has to end its processes when the pool closes."""
PING: Final = 1.0
"""Seconds between signs of life."""
GONE: Final = "agent is gone"
"""What the link says of an agent that it does not find."""


class Session:
    """The conversation with one host's agent. Thread-safe."""

    def __init__(
        self,
        host: Host,
        reach: Callable[[], Transport],
        launch: Launch,
        listener: Listener,
        *,
        lease: float,
        silence: float = 10.0,
    ) -> None:
        """`lease` is how long the two sides may be apart; after `silence` a host is lost when others answer."""
        self.host = host
        self._reach = reach
        self._launch = launch
        self._lease = lease
        self._pace = min(PING, lease / 4) if lease else PING
        self._inbox = Inbox(host.name, listener)
        self._mux = self._inbox.mux
        self._lock = threading.Lock()
        self._gate = threading.Lock()
        self._deadline = 0.0
        self._until = float("inf")
        self._next_stream = 1
        self._ended: Exception | None = None
        self._farewell = False
        self._pinged = 0.0
        self._wire = Wire()
        self._turns = Turns(self._pump, self._wire.poke)
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
            join=self._rejoin,
        )

    @property
    def agent(self) -> AgentHello | None:
        """What the host said of itself, once it is open."""
        return self._inbox.agent

    # ---- opening and closing

    def open(self) -> AgentHello:
        """Connects and waits for the agent's hello. Raises a HostError."""
        with self._gate:
            try:
                self._join()
                agent = self._introduce()
            except BaseException:
                self._leave()
                raise
            self._turns.start(f"skyfab-{self.host.name}")
            return agent

    def _join(self) -> None:
        """Starts the link on the host; from then on the stream speaks frames."""
        self._deadline = time.monotonic() + CONNECT
        transport = self._reach()
        stream: Stream | None = None
        try:
            stream = transport.open(self._launch.command())
            self._launch.join(stream, deadline=self._deadline, stopped=lambda: self._farewell)
            transport.joined()
        except BaseException:
            if stream is not None:
                stream.close()
            transport.close()
            raise
        self._deadline = max(self._deadline, time.monotonic() + CONNECT)  # an environment may have been made meanwhile
        self._mux.attach(self._hello())
        self._wire.take(stream, transport)

    def _rejoin(self, transport: Transport, deadline: float, stopped: Callable[[], bool]) -> Stream:
        """Another stream to the same agent. Raises a HostError."""
        assert self.agent is not None
        launch = replace(self._launch, python=self.agent.executable, prepare=None)
        stream = transport.open(launch.command("resume"))
        try:
            launch.join(stream, deadline=deadline, stopped=stopped)
        except BaseException:
            stream.close()
            raise
        transport.joined()
        return stream

    def _introduce(self) -> AgentHello:
        with self._lock:
            self._read()  # some of it may have come together with the link's answer
        while self.agent is None and self._ended is None and time.monotonic() < self._deadline:
            self._pump(0.5)
        if self._ended is not None and self.agent is None:
            failed = self._ended
            if isinstance(failed, ProtocolError):  # whatever it is that speaks there
                failed = HostLost("", host=self.host.name)
            raise cannot_run(failed, self.host)
        if self._ended is not None:
            raise self._ended
        if self.agent is None:
            raise HostUnfit("its agent does not answer", host=self.host.name)
        _check(self.agent, self.host)
        if self._farewell:
            raise HostLost("the pool was closed", host=self.host.name)
        return self.agent

    def _hello(self) -> bytes:
        received = self._mux.received
        return ClientHello(protocol=VERSION, received=received, lease=self._lease, name=self.host.name).encode()

    def close(self) -> None:
        """Says goodbye: the agent ends its ranks and itself. Waits for that, but not for long.

        While another thread opens the session, that fails first.
        """
        self._farewell = True
        self.poke()
        with self._gate:
            self._leave()

    def _leave(self) -> None:
        self._farewell = True
        self._until = time.monotonic() + GOODBYE
        with self._lock:
            if self._wire.stream is not None and self._ended is None:
                self._mux.bye()
                self._flush()
        self.poke()
        self._turns.join(GOODBYE + 1)
        with self._turns.held:
            self._wire.close()
            self._reunion.close()

    def abandon(self) -> None:
        """Waits until the agent has heard everything, and leaves it to itself. Raises HostLost."""
        with self._lock:
            self._mux.ping()
        if not self._turns.wait(self._is_heard) and self._ended is not None:
            raise self._ended
        with self._lock:
            self._farewell = True
            self._wire.let_go()
        self.close()

    def _is_heard(self) -> bool:
        with self._lock:
            if not self._mux.is_heard and time.monotonic() - self._pinged > 0.05:
                self._pinged = time.monotonic()
                self._mux.ping()
            return self._mux.is_heard

    def end_agent(self) -> None:
        """Ends an agent that was given up, if it is there. Raises a HostError."""
        transport = self._reach()
        stream = self._rejoin(transport, time.monotonic() + CONNECT, lambda: False)
        try:
            stream.send([frame(BYE)])
        finally:
            close(stream, transport)

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
            stream = self._next_stream
            self._next_stream += 2
            if answer is not None:
                self._inbox.exchanges[stream] = Exchange(answer, failure or _ignore, seat)
            drained = self._say(stream, head, parts, urgent=urgent)
        if not drained:
            self.poke()
        return stream

    def begin(self, head: bytes, data: bytes, seat: str) -> Reply:
        """Sends a small message whose answer this thread will `await_reply`. Raises HostLost."""
        with self._lock:
            if self._ended is not None:
                raise self._ended
            stream = self._next_stream
            self._next_stream += 2
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
            self.poke()
        return reply

    def await_reply(self, reply: Reply) -> None:
        """Raises HostLost when the host is gone first."""
        self._turns.wait(reply.is_there)
        if reply.error is not None:
            raise reply.error

    def ask(self, message: Message, parts: Sequence[Buffer] = ()) -> Message:
        """Sends a message and waits for its answer. Raises what the host says went wrong."""
        found: list[Message] = []
        failed: list[Exception] = []
        self.send(message, parts, answer=lambda reply, _: found.append(reply), failure=failed.append)
        self.wait(lambda: bool(found or failed))
        if failed:
            raise failed[0]
        if isinstance(found[0], messages.Failed):
            raise HostUnfit(found[0].text, host=self.host.name, hint=found[0].hint)
        return found[0]

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes sent and received so far."""
        return self._mux.bytes_out, self._mux.bytes_in

    # ---- waiting and reading

    def wait(self, done: Callable[[], bool], timeout: float | None = None) -> bool:
        """Reads until `done()`, or lets another caller do so. False: time is up."""
        return self._turns.wait(done, timeout)

    def poke(self) -> None:
        """Makes whoever waits look again."""
        self._wire.poke()

    def _pump(self, timeout: float | None) -> None:
        """Waits for the stream once, reads and writes what it can, and hands out what has arrived."""
        if self._reunion.fresh is not None:
            self._adopt()
        wait = self._pace if timeout is None else min(timeout, self._pace)
        if self._farewell:
            wait = min(wait, 0.5)
        main = threading.get_ident() == MAIN
        outer = INTERRUPTS.held
        if main:
            INTERRUPTS.held = False  # here alone may it be interrupted: nothing has been read yet
        ready = self._wire.wait(wait, self._mux.has_output)
        if main:
            INTERRUPTS.held = True
        try:
            after = self._take_in(ready)
            if after:
                self._turns.call(after)
        finally:
            if main:
                INTERRUPTS.held = outer
                if INTERRUPTS.missed is not None and not outer:
                    INTERRUPTS.go_on()

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
            self._finish(HostLost("interrupted while it was answering", host=self.host.name))
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
            self._break(HostLost(f"the connection broke: {error}", host=self.host.name))
        except SkyfabError as error:
            error.host = error.host or self.host.name
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
        if self._reunion.verdict is not None:
            self._finish(self._reunion.verdict)
        elif self._farewell and (now > self._until or self._wire.stream is None):
            self._finish(None)
        elif now - self._pinged > self._pace:
            self._pinged = now
            self._mux.ping()
        if now - self._mux.heard > DOUBT and self.agent is not None:
            self._reunion.doubt(f"not a word for {DOUBT:.0f} s")

    # ---- other streams

    @property
    def heard(self) -> float:
        """When the host last said something; it says something every few seconds."""
        return self._reunion.heard

    def _break(self, error: Exception | None) -> None:
        """The stream has ended, and not because somebody wanted it to: another may take its place."""
        if self._ended is not None:
            return
        if self._farewell or self.agent is None:
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
        self._ended = error or HostLost("the pool is closed", host=self.host.name)
        self._turns.over = True
        lost = None
        if not self._farewell and self.agent is not None:
            lost = self._ended = _as_lost(self._ended, self.host)
        self._inbox.end(self._ended, lost=lost)


def _ignore(error: Exception) -> None:
    """For requests whose failure nobody waits for."""


def _as_lost(error: Exception, host: Host) -> HostLost:
    """It was there: whatever its connection says of its end, that is over."""
    if isinstance(error, HostLost):
        return error
    lost = HostLost(str(error), host=host.name)
    if isinstance(error, SkyfabError):
        lost = HostLost(error.message, host=host.name, hint=error.hint)
    lost.__cause__ = error
    return lost


def _check(agent: AgentHello, host: Host) -> None:
    """Functions travel as byte code: the interpreters must agree before anything is unpickled."""
    import cloudpickle

    if agent.python != local_python():
        raise other_python(agent.python, host)
    if agent.cloudpickle != cloudpickle.__version__:
        raise HostUnfit(
            f"it has cloudpickle {agent.cloudpickle}, this program {cloudpickle.__version__}",
            host=host.name,
            hint="make them the same version",
        )
