"""One connection to a host's agent: its state, its current stream, and what is sent and received over it.

One thread reads for all connections of a pool (reader.py). When the stream breaks, or heartbeats are missed, it is
replaced by another stream to the same agent (reconnect.py), and both sides continue where they were.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from skyfab._util.signals import SIGNAL_GUARD
from skyfab.errors import CallCancelled, HostLost, SkyfabError
from skyfab.inventory.host import Host
from skyfab.protocol import VERSION
from skyfab.protocol.frames import Buffer
from skyfab.protocol.messages import AgentHello, ClientHello, Message
from skyfab.protocol.pipes import Lender
from skyfab.session.reader import Action, SharedReader, run
from skyfab.session.reconnect import Link, Reconnector, as_lost, close, close_later
from skyfab.session.replies import Answer, Failure, Listener, PendingRequest, Replies
from skyfab.session.state import LEAVING, NEXT, State
from skyfab.session.timing import EXIT, Timing
from skyfab.ssh.base import Stream

_LAST_STREAM: Final = 2**32 - 1


class Connection:
    """Sends to one agent and receives from it. Thread-safe; received messages are handled on the reading thread."""

    def __init__(
        self,
        host: Host,
        listener: Listener,
        reader: SharedReader,
        joiner: Any,
        timing: Timing,
    ) -> None:
        """`joiner` opens further streams to the same agent: the `Session`."""
        self.host = host.name
        self.listener = listener
        self.joiner = joiner
        self.timing = timing
        self.interval = timing.interval
        self.lock = threading.Lock()
        self.replies = Replies(host.name, listener, timing.clock)
        self.ended: Exception | None = None
        """Why nothing more will be received; None while the connection is in use."""
        self.state = State.NEW
        self._is_local = host.transport == "local"
        self._mux = self.replies.mux
        self._reader = reader
        self._reconnector: Reconnector | None = None
        self._resumed: tuple[float, Reconnector] | None = None
        """When it was open again after the last outage, and what served it then."""
        self._link: Link | None = None
        self.stream: Stream | None = None
        self._source = self._stderr = self._sink = -1
        """The file descriptors that the reader watches; -1 for none."""
        self._unexplained: Stream | None = None
        self._told = False
        """The connection has ended, and all pending requests have failed."""
        self._close_by = float("inf")
        self._pinged = self._ticked = self._woke = 0.0
        self._next_stream = 1

    @property
    def agent(self) -> AgentHello | None:
        """The agent's description of itself; None before its hello."""
        return self.replies.agent

    @property
    def last_received(self) -> float:
        """When data was last received from the host; normally every few seconds."""
        reconnector = self._reconnector
        return self._mux.last_received if reconnector is None else reconnector.since

    @property
    def responds(self) -> bool:
        """Whether data was received recently; a host that stopped sending is noticed only after `suspect_after`."""
        return self.timing.clock() - self.last_received < self.timing.suspect_after

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes sent and received so far."""
        return self._mux.bytes_out, self._mux.bytes_in

    @property
    def is_leaving(self) -> bool:
        """Whether this side is closing the connection."""
        return self.state in LEAVING

    @property
    def is_suspect(self) -> bool:
        return self.state is State.SUSPECT

    def _enter(self, state: State) -> None:
        """The only place where the state changes."""
        if state not in NEXT[self.state]:
            raise AssertionError(f"{self.host}: {self.state.value} → {state.value}")
        self.state = state

    # ---- opening and closing

    def begin(self, link: Link) -> None:
        """Takes the first stream, over which the agent will send its hello."""
        with SIGNAL_GUARD, self.lock:
            if self.state is State.NEW:  # else it was closed meanwhile
                self._enter(State.CONNECTING)
            self._reader.add(self)
            self._mux.attach(self._hello())
            self._take(link)
            self._read()  # the link's reply and the first frames may have arrived together
            self.flush()
            actions = self._actions()
        run(actions)

    def leave(self) -> None:
        """Starts closing: a thread that opens the connection stops."""
        with SIGNAL_GUARD, self.lock:
            if State.CLOSING in NEXT[self.state]:
                self._enter(State.CLOSING)
        self._reader.poke()

    def close(self, timeout: float) -> None:
        """Sends a goodbye and waits up to `timeout` seconds for the agent to end."""
        self.leave()
        with SIGNAL_GUARD, self.lock:
            self._close_by = self.timing.clock() + timeout
            if self.stream is not None and self.ended is None:
                self._mux.bye()
                self.flush()
            elif self.ended is None:
                self._end(None)
            actions = self._actions()
        run(actions)
        self._reader.wait(lambda: self._told or self.replies.is_done, timeout + 1, self)
        self._reader.wait(lambda: self._told, EXIT, self)
        with SIGNAL_GUARD, self.lock:
            self._end(None)
            self._unwatch()
            link, self._link, self.stream = self._link, None, None
            actions = self._actions()
        run(actions)
        self._reader.discard(self)
        if link is not None:
            close(link)
        self._reader.join(timeout)

    def settle(self) -> None:
        """Waits until the agent has received everything. Raises HostLost."""
        with SIGNAL_GUARD, self.lock:
            self._mux.ping()
            self.flush()
        if not self.wait(self._is_received):
            raise copy.copy(self.ended) or HostLost("the pool was closed", host=self.host)

    def detach(self) -> None:
        """Disconnects without a goodbye, unless the connection has ended."""
        with SIGNAL_GUARD, self.lock:
            if State.DETACHED in NEXT[self.state]:
                self._enter(State.DETACHED)
                self._let_go()

    def explain(self) -> None:
        """Sets `ended` to why the first stream ended before the agent's hello. May block for seconds."""
        stream, self._unexplained = self._unexplained, None
        if stream is not None:
            self.ended = stream.explain()

    def _hello(self) -> bytes:
        """How much this side has received; the first message on every stream."""
        return ClientHello(
            protocol=VERSION, received=self._mux.received, lease=self.timing.lease, local=self._is_local
        ).encode()

    def _is_received(self) -> bool:
        with SIGNAL_GUARD, self.lock:
            if not self._mux.is_received and self.timing.clock() - self._pinged > 0.05:
                self._pinged = self.timing.clock()
                self._mux.ping()
                self.flush()
            return self._mux.is_received

    # ---- sending

    def send(
        self,
        message: Message | bytes,
        parts: Sequence[Buffer] = (),
        *,
        answer: Answer | None = None,
        failure: Failure | None = None,
        worker: str | None = None,
        urgent: bool = False,
    ) -> int:
        """Sends a message. `answer` or `failure` is called once, on the reading thread.

        With `worker`, that worker's output so far is shown before the reply. Returns the stream number. Raises HostLost
        if the host is lost.
        """
        head = message if isinstance(message, bytes) else message.encode()
        with SIGNAL_GUARD, self.lock:
            if self.ended is not None:
                raise copy.copy(self.ended)
            number, stream = self.new_number(), self.stream
            if urgent or stream is None:
                self._mux.send(number, head, parts, urgent=urgent)
                self.flush()
            else:
                try:
                    drained = self._mux.send_now(number, head, parts, stream.send)
                except OSError:
                    drained = True  # reading from the stream gives the reason
                if not drained:
                    self._watch_sink()
            if answer is not None:  # now that nothing more raises an error, which would be reported twice
                self.replies.pending[number] = PendingRequest(answer, failure or _ignore, worker)
        return number

    def wait(self, done: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits until `done()`. False: a timeout, or the connection has ended."""
        self._reader.wait(lambda: done() or self._told, timeout, self)
        return done()

    def wake(self) -> None:
        """Makes the reader call `on_wake`."""
        self._reader.wake(self)

    def new_number(self) -> int:
        """The next unused odd stream number; wraps around after 32 bits."""
        number = self._next_stream
        while number in self.replies.pending:
            number = number + 2 if number < _LAST_STREAM else 1
        self._next_stream = number + 2 if number < _LAST_STREAM else 1
        return number

    # ---- callbacks of the reader

    def on_ready(self, fd: int) -> Sequence[Action]:
        """Reads or writes as much as possible."""
        with self.lock:
            if fd == self._source:
                self._read()
                if self._mux.has_output and self.ended is None:
                    self.flush()
            elif fd == self._sink:
                self._reader.unwatch(fd)
                self._sink = -1
                self.flush()
            elif fd == self._stderr:
                self._drain()
            return self._actions()

    def on_wake(self) -> Sequence[Action]:
        """Switches to a new stream, ends, or writes pending data."""
        with self.lock:
            reconnector = self._reconnector
            if self.ended is not None:
                return self._actions()
            if reconnector is not None and reconnector.lost_error is not None:
                self._end(reconnector.lost_error)
            elif self._is_to_end(self.timing.clock()):
                self._end(None)
            elif reconnector is not None and (candidate := reconnector.take_candidate()) is not None:
                self._mux.attach(self._hello())
                self._let_go()
                self._take(candidate)
                self._read()  # the link's reply and the first frames may have arrived together
            if self.ended is None:
                self.flush()
            return self._actions()

    def on_tick(self, now: float) -> Sequence[Action]:
        """Sends a heartbeat, and checks whether the host's heartbeats are missed."""
        with self.lock:
            if self.ended is not None:
                return ()
            if now - max(self._ticked, self._mux.last_received) > max(2 * self.interval, 1.0):
                self._woke = now  # this program was suspended and sent no pings, so that no replies are to be expected
            self._ticked = now
            if self._is_to_end(now):
                self._end(None)
            else:
                self._pinged = now
                self._mux.ping()
                suspect_after = self.timing.suspect_after
                if now - max(self._mux.last_received, self._woke) > suspect_after and self.state is State.OPEN:
                    self._suspect("no heartbeat")
                self.flush()
                if self._reconnector is not None:
                    self.replies.after.append(self._reconnector.start)
            return self._actions()

    def _is_to_end(self, now: float) -> bool:
        return self.state in LEAVING and (now > self._close_by or self.stream is None)

    def _actions(self) -> Sequence[Action]:
        if self.state is State.CONNECTING and self.replies.agent is not None:
            self._enter(State.OPEN)
        return self.replies.take() if self.replies.after else ()

    def on_error(self, error: BaseException) -> Sequence[Action]:
        """A callback has raised: it is unknown how much was read."""
        broken = HostLost(f"what it sent could not be handled: {error!r:.200}", host=self.host)
        broken.__cause__ = error
        with self.lock:
            self._end(broken)
            return self._actions()

    # ---- the stream, with the lock held

    def _take(self, link: Link) -> None:
        """Makes this link's stream the current one."""
        self._link, self.stream = link, link[0]
        self.stream.is_used = True
        self._lend = Lender(self.stream, self.stream.sink)
        self._source = self.stream.fileno()
        self._reader.watch(self._source, self)
        stderr = self.stream.stderr()
        if stderr is not None:
            self._stderr = stderr
            self._reader.watch(stderr, self)

    def _let_go(self) -> None:
        """Removes the current stream. It is closed on another thread, since that may block."""
        self._unwatch()
        link, self._link, self.stream = self._link, None, None
        if link is not None:
            close_later(link)

    def _unwatch(self) -> None:
        for fd in (self._source, self._stderr, self._sink):
            if fd >= 0:
                self._reader.unwatch(fd)
        self._source = self._stderr = self._sink = -1

    def _watch_sink(self) -> None:
        """Has the reader call `on_ready` when more data can be written."""
        if self._sink < 0 and self.stream is not None:
            sink = self.stream.sink()
            if sink is None:
                self._reader.retry_soon(self)
            else:
                self._sink = sink
                self._reader.watch(sink, self, writing=True)

    def _drain(self) -> None:
        assert self.stream is not None
        self.stream.drain()
        if self.stream.stderr() is None:
            self._reader.unwatch(self._stderr)
            self._stderr = -1

    def _read(self) -> None:
        stream = self.stream
        assert stream is not None
        try:
            if not self._mux.read(stream.recv_into):
                self._broke()
        except BlockingIOError:
            pass
        except (OSError, EOFError) as error:
            self._broke(f"the connection broke: {error}")
        except SkyfabError as error:
            error.host = error.host or self.host
            self._end(error)

    def flush(self) -> None:
        """Writes as much as possible."""
        if self.stream is None:
            return
        try:
            drained = self._mux.flush(self._lend)
        except OSError:
            return  # reading from the stream gives the reason
        if not drained:
            self._watch_sink()

    # ---- failures, with the lock held

    def _broke(self, reason: str = "") -> None:
        """Handles the end of the stream."""
        if self.ended is not None:
            return
        if self.state in LEAVING:
            self._end(None)
        elif self.replies.agent is None:
            self._unexplained = None if reason else self.stream
            self._end(HostLost(reason or "the connection broke", host=self.host))
        else:
            link, self._link, self.stream = self._link, None, None
            self._unwatch()
            assert link is not None
            self._suspect(reason).broke(link)

    def _suspect(self, reason: str) -> Reconnector:
        """The stream is broken or seems to be: starts to attempt new ones."""
        if self._reconnector is None:
            if self.state is State.CONNECTING:
                self._enter(State.OPEN)  # the hello was received just before the stream broke
            self._enter(State.SUSPECT)
            self._reconnector = Reconnector(self, reason, self._since())
            self.replies.after.append(self._reconnector.start)
        return self._reconnector

    def _since(self) -> float:
        """Since when the host is away. A stream that ended soon, and brought nothing, was only a part of an outage."""
        if self._resumed is not None:
            at, last = self._resumed
            if self.timing.clock() - at < self.timing.suspect_after and self._mux.received == last.received:
                return last.since
        return self._mux.last_received

    def resume(self) -> None:
        """Reopens the connection: the agent responds again."""
        assert self._reconnector is not None
        self._enter(State.OPEN)
        self._resumed = self.timing.clock(), self._reconnector
        self._reconnector = None

    def _end(self, error: Exception | None) -> None:
        """Ends the connection: fails all pending requests."""
        if self.ended is not None:
            return
        self._unwatch()
        lost: HostLost | None = None
        if self.state in LEAVING:
            self._enter(State.CLOSED)
            error = error or CallCancelled("the pool was closed", host=self.host)
        else:
            self._enter(State.LOST)
            if self.replies.agent is not None:
                error = lost = as_lost(error, self.host)
        assert error is not None
        self.ended = error
        self.replies.end(error, lost=lost)
        self.replies.after.append(self._tell_end)
        self._reader.discard(self)

    def _tell_end(self) -> None:
        """Runs after all other callbacks."""
        self._told = True


def _ignore(error: Exception) -> None:
    """For requests without a failure callback."""
