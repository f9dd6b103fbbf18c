"""A seat: one rank process as the agent sees it, and the calls it has been given.

The agent relays frames between the connection and the seat's pipes without looking into user data.
Calls run in the order in which they came; the first one without an answer is the one that runs.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import select
import signal
from collections import deque

from skyfab.errors import ProtocolError
from skyfab.protocol import messages
from skyfab.protocol.blobs import inline_size
from skyfab.protocol.frames import BYE, DATA, HEAD, HEADER, Reader, data_header
from skyfab.protocol.pipes import widen

TYPE_CHECKING = False  # a cold host has no time for `typing`
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Final, Protocol

    from skyfab.agent.logs import LogPipe
    from skyfab.agent.record import Record
    from skyfab.protocol.streams import Buffer, Mux

    Piece = tuple[Buffer, int, int]
    """Bytes for the rank; the stream and length whose credit goes back once they are taken."""
else:
    Protocol = object

_LAST_WORDS: Final = 2.0
"""Seconds from SIGTERM to SIGKILL."""
_BACKLOG: Final = 2 * 1024 * 1024
"""Bytes of an answer that may wait for the connection before the rank is left waiting."""


class Running:
    """A call that has been handed to the seat and not answered."""

    __slots__ = ("deadline", "held", "stream", "timeout", "verdict")

    def __init__(self, stream: int, timeout: float | None) -> None:
        self.stream = stream
        self.timeout = timeout
        self.deadline: float | None = None
        self.held: list[Piece] = []
        """Its frames, while calls before it run."""
        self.verdict = ""
        """Why the process was ended on purpose: timeout or cancelled."""


class Owner(Protocol):
    """What a seat needs of its agent."""

    mux: Mux | Record
    dirty: set[Seat]
    """Seats with something to flush."""
    stuck: set[Seat]
    """Seats that wait for the connection."""

    behind: set[LogPipe]
    """Logs that have not been passed on to the end."""
    timed: set[Seat]
    """Seats whose call may take only so long."""

    def now(self) -> float: ...
    def flush(self) -> None: ...
    def relay(self, frame: memoryview) -> bool: ...
    def kill(self, seat: Seat, number: int = ...) -> None: ...
    def abandon(self, stream: int) -> None: ...
    def drain(self, log: LogPipe) -> None: ...
    def writable(self, seat: Seat, wanted: bool) -> None: ...
    def readable(self, seat: Seat, wanted: bool) -> None: ...


class Seat:
    """One rank process: its socket, its logs, its calls."""

    def __init__(
        self, owner: Owner, number: int, name: str, generation: int, logs: Sequence[LogPipe], rank: int = 0
    ) -> None:
        self._owner = owner
        self.number = number
        """Names the process for the zygote; a seat's name can be taken again."""
        self.group = 0
        """The process group that the rank leads, once it is known."""
        self.name = name
        self.generation = generation
        self.rank = rank
        self.logs = logs
        rank_in, self.sink = os.pipe()
        self.source, rank_out = os.pipe()
        self.functions: set[str] = set()
        self.calls: deque[Running] = deque()
        self.rank_ends = (rank_in, rank_out)
        for fd in (self.source, self.sink):
            os.set_blocking(fd, False)
            widen(fd)
        self.waits_to_write = False
        """The rank's pipe is full: somebody watches for room in it."""
        self.paused = False
        self.condemned = False
        self._doom: float | None = None
        """When it is ended by force, if it has not ended by itself."""
        self._recv_into = io.FileIO(self.source, closefd=False).readinto
        self._poll = select.poll()
        for log in logs:
            self._poll.register(log, select.POLLIN)
        self._reader = Reader(self, express=self._return)
        self._out: deque[Piece] = deque()
        self._stalled: deque[tuple[tuple[int, ...] | None, int, int, bytes, int]] = deque()
        """Frames of answers, each with how far the logs must be told before it."""
        self._answer: tuple[int, int] | None = None
        """The large answer under way: its stream, and how many bytes are missing."""

    # ---- towards the rank

    def tell(self, stream: int, head: bytes, data: Buffer | None) -> None:
        """Passes the opening of a message on, with its data if that is small."""
        self._queue(self._out, _opening(stream, head, data))

    def tell_data(self, stream: int, data: Buffer) -> None:
        """Passes on data of a message that is not a call's."""
        self._queue(self._out, (data_header(stream, len(data)), 0, 0), (data, 0, 0))

    def give(self, call: Running, head: bytes, data: Buffer | None) -> None:
        """Takes a call. It goes to the rank when those before it are answered; till then it can be taken back."""
        self.calls.append(call)
        if len(self.calls) > 1:
            call.held.append(_opening(call.stream, head, data))
            return
        if call.timeout is not None:
            self._begin()
        piece = _opening(call.stream, head, data)
        if self._out or data is None:
            self._queue(self._out, piece)
        else:
            self._write(piece[0])

    def take(self, stream: int, frame: memoryview) -> bool:
        """Takes a small call as it came, if nothing is in its way."""
        if self.calls or self._out or self.condemned:
            return False
        self.calls.append(Running(stream, None))
        self._write(frame)
        return True

    def _write(self, frame: Buffer) -> None:
        """Straight to the rank: nothing waits before it."""
        try:
            sent = os.write(self.sink, frame)
        except OSError:
            sent = 0  # full, or gone: the ordinary way finds out
        if sent < len(frame):
            self._queue(self._out, (bytes(frame[sent:]), 0, 0))

    def give_data(self, stream: int, data: Buffer) -> None:
        """More data of a large call."""
        pieces: tuple[Piece, ...] = ((data_header(stream, len(data)), 0, 0), (data, stream, len(data)))
        for place, call in enumerate(self.calls):
            if call.stream == stream:
                self._queue(call.held if place else self._out, *pieces)

    def _queue(self, line: list[Piece] | deque[Piece], *pieces: Piece) -> None:
        line.extend(pieces)
        if line is self._out and not self.waits_to_write:
            self._owner.dirty.add(self)  # frames that arrive together leave together

    def flush(self) -> None:
        try:
            while self._out:
                buffers = [entry[0] for entry in itertools.islice(self._out, 32)]
                self._consume(os.writev(self.sink, buffers))
        except BlockingIOError:
            self._owner.writable(self, True)
            return
        except OSError:  # the rank is gone; its end is told by the zygote
            self._out.clear()
        if self.waits_to_write:
            self._owner.writable(self, False)

    def _consume(self, sent: int) -> None:
        while sent:
            buffer, stream, length = self._out[0]
            if sent < len(buffer):
                self._out[0] = (memoryview(buffer)[sent:], stream, length)
                return
            sent -= len(buffer)
            self._out.popleft()
            if length:
                self._owner.mux.used(stream, length)

    # ---- from the rank

    def read(self) -> None:
        """Takes what the rank has to say."""
        try:
            if self._reader.pump(self._recv_into):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        except ProtocolError:  # it wrote to our pipe: that is its end, not ours
            self.kill()
        self._owner.readable(self, False)  # it has hung up

    def place(self, stream: int, length: int) -> memoryview:
        return memoryview(bytearray(length))

    def _return(self, stream: int, frame: memoryview, head: int) -> bool:
        """Passes a small answer on as it lies, if nothing is in its way."""
        if self._stalled or not self.calls or self.calls[0].stream != stream or self._poll.poll(0):
            return False
        if self._owner.behind or not self._owner.relay(frame):
            return False
        self._close(stream)
        return True

    def arrived(self, kind: int, stream: int, payload: memoryview, head: int) -> None:
        marks: tuple[int, ...] | None = ()
        if kind == BYE:  # it ends after the answer that follows
            self.condemned = True
            return
        if kind == HEAD:
            if self._poll.poll(0):
                for log in self.logs:
                    self._owner.drain(log)
            if any(log.waiting for log in self.logs):
                marks = self._marks()
        if not self._stalled and marks is not None and self._told(marks):
            self._pass_on(kind, stream, payload, head)
        else:
            self._stalled.append((marks, kind, stream, bytes(payload), head))
            self._pause()

    def _marks(self) -> tuple[int, ...] | None:
        """How far each log has come; None while there is no room for what the process has written."""
        if any(log.stopped for log in self.logs) or self._poll.poll(0):
            return None
        return tuple(log.end for log in self.logs)

    def _told(self, marks: tuple[int, ...]) -> bool:
        """What the process had written before its answer is on its way: only then may the answer follow."""
        if not marks or all(log.told(mark) for log, mark in zip(self.logs, marks, strict=True)):
            return True
        self._owner.flush()
        return all(log.told(mark) for log, mark in zip(self.logs, marks, strict=True))

    def _pass_on(self, kind: int, stream: int, payload: Buffer, head: int) -> None:
        mux = self._owner.mux
        if kind == DATA:
            self._relay(stream, payload)
        elif head:
            mux.send(stream, bytes(payload[:head]), (payload[head:],))
            self._close(stream)
        elif kind == HEAD:
            content = bytes(payload)
            mux.send(stream, content, large=True)
            missing = inline_size(getattr(messages.decode(content), "parts", ()))
            if missing:
                self._answer = (stream, missing)
            else:
                self._close(stream)

    def _pause(self) -> None:
        self.paused = True
        self._owner.stuck.add(self)
        self._owner.readable(self, False)

    def _relay(self, stream: int, payload: Buffer) -> None:
        if self._answer is None:
            return
        missing = self._answer[1] - len(payload)
        self._answer = (stream, missing)
        self._owner.mux.send_data(stream, payload)
        if missing <= 0:
            self._answer = None
            self._close(stream)
        elif self._owner.mux.queued(stream) > _BACKLOG:
            self._pause()

    def _close(self, stream: int) -> None:
        """An answer is complete: the next call, if any, has begun."""
        if self.calls and self.calls[0].stream == stream:
            self.calls.popleft()
            self._owner.timed.discard(self)
        if self.calls:
            self._begin()

    def _begin(self) -> None:
        call = self.calls[0]
        if call.timeout is not None:
            call.deadline = self._owner.now() + call.timeout
            self._owner.timed.add(self)
        if call.held:
            self._queue(self._out, *call.held)
            call.held = []

    def resume(self) -> bool:
        """Goes on where it paused: the logs are out, and the connection has taken enough of a large answer.

        True: it did.
        """
        before = len(self._stalled)
        while self._stalled and self._is_next():
            self._pass_on(*self._stalled.popleft()[1:])
        if self._stalled or (self._answer is not None and self._owner.mux.queued(self._answer[0]) >= _BACKLOG // 2):
            return len(self._stalled) < before
        self.paused = False
        self._owner.stuck.discard(self)
        self._owner.readable(self, True)
        return True

    def _is_next(self) -> bool:
        """The first of the frames that wait may be passed on."""
        marks, *frame = self._stalled[0]
        if marks is None:
            marks = self._marks()
            if marks is None:
                return False
            self._stalled[0] = (marks, *frame)  # type: ignore[assignment]
        return self._told(marks)

    # ---- endings

    def check_time(self, now: float) -> float | None:
        """Ends a call that is past its time, or a process past its last words; else says when to look again."""
        if self._doom is not None:
            if self._doom > now:
                return self._doom
            self._doom = None
            self.kill()
            return None
        deadline = self.calls[0].deadline if self.calls else None
        if deadline is not None and deadline <= now:
            self.condemn("timeout")
            return self._doom
        return deadline

    def cancel(self, stream: int) -> None:
        """Stops a call: by ending the process if it runs."""
        if self.calls and self.calls[0].stream == stream:
            self.condemn("cancelled")
        else:
            self.take_back(stream, "cancelled")

    def end_soon(self, seconds: float) -> None:
        """The call that runs has so much time left: others have failed, and it may wait for them."""
        if self.calls:
            self.calls[0].verdict = "cancelled"
            self.calls[0].deadline = self._owner.now() + seconds
            self._owner.timed.add(self)

    def take_back(self, stream: int, why: str) -> None:
        """A call that has not begun never will."""
        for call in list(self.calls)[1:]:
            if call.stream == stream:
                self.calls.remove(call)
                self._owner.abandon(stream)
                self._owner.mux.send(stream, messages.Ended(why=why).encode())

    def condemn(self, verdict: str) -> None:
        """Ends the process for the sake of the call that runs."""
        if self.calls:
            self.calls[0].deadline = None
            self.calls[0].verdict = self.calls[0].verdict or verdict
        if not self.condemned:
            self.condemned = True
            self._doom = self._owner.now() + _LAST_WORDS
            self._owner.timed.add(self)
            self._owner.kill(self, signal.SIGTERM)

    def dismiss(self) -> bool:
        """Lets a process that has nothing to do end by itself, as it likes. False: it must be killed."""
        if self.calls or self._out or self.condemned:
            return False
        self.condemned = True
        self._doom = self._owner.now() + _LAST_WORDS
        self._owner.timed.add(self)
        nowhere = os.open(os.devnull, os.O_WRONLY)  # the number stays ours: others may look at it
        os.dup2(nowhere, self.sink)
        os.close(nowhere)
        return True

    def kill(self) -> None:
        """Ends the process and its group."""
        self.condemned = True
        self._owner.kill(self)

    def ended(self, exitcode: int, text: str) -> None:
        """The process is gone: answers the call that ran, and hands back those that had not begun."""
        with contextlib.suppress(OSError, ProtocolError):
            while self._reader.pump(self._recv_into):
                pass
        for log in self.logs:
            log.drain()
        while self._stalled:
            self._pass_on(*self._stalled.popleft()[1:])
        mux = self._owner.mux
        exited = messages.Exited(seat=self.name, generation=self.generation, text=text, exitcode=exitcode)
        mux.send(0, exited.encode())  # first: those who hear the answers want to know that the seat is free
        for place, call in enumerate(self.calls):
            if self._answer is not None and self._answer[0] == call.stream:
                mux.forget(call.stream)
            if place:
                answer = messages.Ended(why="unstarted")
            elif call.verdict:
                answer = messages.Ended(why=call.verdict, exitcode=exitcode)
            else:
                answer = messages.Ended(why="died", text=text, exitcode=exitcode)
            mux.send(call.stream, answer.encode())
            self._owner.abandon(call.stream)
        self.calls.clear()

    def close(self) -> None:
        for fd in (self.source, self.sink):
            os.close(fd)


def _opening(stream: int, head: bytes, data: Buffer | None) -> Piece:
    """The HEAD frame of a message, with its data if that is small."""
    if data is None:
        return HEADER.pack(HEAD, 0, stream, len(head)) + head, 0, 0
    return b"".join((HEADER.pack(HEAD, len(head), stream, len(head) + len(data)), head, data)), 0, 0
