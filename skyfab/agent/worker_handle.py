"""A seat: one rank process as the agent sees it, and the calls it has been given.

The agent relays frames between the connection and the seat's pipes without looking into user data.
Calls run in the order in which they came; the first one without an answer is the one that runs.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections import deque

from skyfab.agent.worker_output import WorkerOutput
from skyfab.protocol import messages
from skyfab.protocol.frames import HEAD, HEADER, data_header
from skyfab.protocol.pipes import widen

TYPE_CHECKING = False  # a cold host has no time for `typing`
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Final

    from skyfab.agent.logs import LogPipe
    from skyfab.agent.worker_output import Owner
    from skyfab.protocol.frames import Buffer

    Piece = tuple[Buffer, int, int]
    """Bytes for the rank; the stream and length whose credit goes back once they are taken."""

_LAST_WORDS: Final = 2.0
"""Seconds from SIGTERM to SIGKILL."""


class Running:
    """A call that has been handed to the seat and not answered."""

    __slots__ = ("deadline", "held", "large", "stream", "timeout", "verdict")

    def __init__(self, stream: int, timeout: float | None) -> None:
        self.stream = stream
        self.timeout = timeout
        self.deadline: float | None = None
        self.held: list[Piece] = []
        """Its frames, until it begins."""
        self.large = False
        """Its data comes in pieces, whose use is counted."""
        self.verdict = ""
        """Why the process was ended on purpose: timeout or cancelled."""


class WorkerHandle:
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
        self.is_solo = name.startswith("solo.")
        """It is for single calls, and not a rank of a gang."""
        self.logs = logs
        rank_in, self.sink, self.source, rank_out = _pipes()
        self.functions: set[str] = set()
        self.calls: deque[Running] = deque()
        self.rank_ends = (rank_in, rank_out)
        for fd in (self.source, self.sink):
            os.set_blocking(fd, False)
            widen(fd)
        self.waits_to_write = False
        """The rank's pipe is full: somebody watches for room in it."""
        self.stopping = False
        self._kill_at: float | None = None
        """When it is ended by force, if it has not ended by itself."""
        self._out: deque[Piece] = deque()
        self.output = WorkerOutput(self, owner)

    # ---- towards the rank

    def tell(self, stream: int, head: bytes, data: Buffer | None) -> None:
        """Passes the opening of a message on, with its data if that is small."""
        self._queue(self._out, _opening(stream, head, data))

    def tell_data(self, stream: int, data: Buffer) -> None:
        """Passes on data of a message that is not a call's."""
        self._queue(self._out, (data_header(stream, len(data)), 0, 0), (data, 0, 0))

    def give(self, call: Running, head: bytes, data: Buffer | None) -> None:
        """Takes a call. It goes to the rank when those before it are answered; till then it can be taken back.

        A call that comes while the process ends is held until then: answered earlier, it would come again at once.
        """
        call.large = data is None
        self.calls.append(call)
        if len(self.calls) > 1 or self.stopping:
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
        if self.calls or self._out or self.stopping:
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
        for call in self.calls:
            if call.stream == stream:
                self._queue(call.held or self._out, *pieces)

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

    # ---- one call after another

    def answered(self, stream: int) -> None:
        """An answer is complete: the next call, if any, begins, unless the process is to end."""
        if self.calls and self.calls[0].stream == stream:
            if self.calls.popleft().large:
                self._owner.mux.finish(stream)
            if not self.stopping:
                self._owner.timed.discard(self)
        if self.stopping:
            self._end_after_answer()
        elif self.calls:
            self._begin()

    def _end_after_answer(self) -> None:
        """Ends a process that is to end and has answered: at once if SIGTERM was sent, else it may exit by itself."""
        if self._kill_at is not None:
            self.kill()
        else:
            self._kill_at = self._owner.now() + _LAST_WORDS
            self._owner.timed.add(self)

    def _begin(self) -> None:
        call = self.calls[0]
        if call.timeout is not None:
            call.deadline = self._owner.now() + call.timeout
            self._owner.timed.add(self)
        if call.held:
            self._queue(self._out, *call.held)
            call.held = []

    # ---- endings

    def check_time(self, now: float) -> float | None:
        """Ends a call that is past its time, or a process past its last words; else says when to look again."""
        if self._kill_at is not None:
            if self._kill_at > now:
                return self._kill_at
            self._kill_at = None
            self.kill()
            return None
        deadline = self.calls[0].deadline if self.calls else None
        if deadline is not None and deadline <= now:
            self.stop("timeout")
            return self._kill_at
        return deadline

    def cancel(self, stream: int) -> None:
        """Stops a call: by ending the process if it runs."""
        if self.calls and self.calls[0].stream == stream and not self.calls[0].held:
            self.stop("cancelled")
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
        for call in list(self.calls):
            if call.stream == stream and call.held:
                self.calls.remove(call)
                self._owner.abandon(stream)
                self._owner.mux.send(stream, messages.Ended(why=why).encode())

    def stop(self, verdict: str) -> None:
        """Ends the process for the sake of the call that runs."""
        if self.calls:
            self.calls[0].deadline = None
            self.calls[0].verdict = self.calls[0].verdict or verdict
        if not self.stopping:
            self.stopping = True
            self._kill_at = self._owner.now() + _LAST_WORDS
            self._owner.timed.add(self)
            self._owner.kill(self, signal.SIGTERM)

    def shut_down(self) -> bool:
        """Lets a process that has nothing to do end by itself, as it likes. False: it must be killed."""
        if self.calls or self._out or self.stopping:
            return False
        self.stopping = True
        self._kill_at = self._owner.now() + _LAST_WORDS
        self._owner.timed.add(self)
        nowhere = os.open(os.devnull, os.O_WRONLY)  # the number stays ours: others may look at it
        os.dup2(nowhere, self.sink)
        os.close(nowhere)
        return True

    def announce_end(self) -> None:
        """Before the end of an answer: a client that has that one sends no other call to a process that ends."""
        if self.stopping:
            exited = messages.Exited(worker=self.name, generation=self.generation, text="it is ending", exitcode=0)
            self._owner.mux.send(0, exited.encode())

    def kill(self) -> None:
        """Ends the process and its group."""
        self.stopping = True
        self._owner.kill(self)

    def ended(self, exitcode: int | None, text: str) -> None:
        """The process is gone: answers the call that ran, and hands back those that had not begun.

        The exit code is None where it has never been there.
        """
        self.stopping = True  # an answer that is read only now must not begin the next call
        self._kill_at = None
        broken = self.output.finish()
        mux = self._owner.mux
        exited = messages.Exited(worker=self.name, generation=self.generation, text=text, exitcode=exitcode)
        mux.send(0, exited.encode())  # first: those who hear the answers want to know that the seat is free
        for call in self.calls:
            if call.stream == broken:
                mux.forget(call.stream)
            if call.held:
                answer = messages.Ended(why="unstarted")
            elif call.verdict:
                answer = messages.Ended(why=call.verdict, exitcode=exitcode)
            else:
                answer = messages.Ended(why="died", text=text, exitcode=exitcode)
            mux.send(call.stream, answer.encode())
            mux.finish(call.stream)
            self._owner.abandon(call.stream)
        self.calls.clear()

    def close(self) -> None:
        for fd in (self.source, self.sink):
            os.close(fd)


def _pipes() -> tuple[int, int, int, int]:
    """Two pipes or, where there is no room for both, none."""
    one = os.pipe()
    try:
        return (*one, *os.pipe())
    except OSError:
        for fd in one:
            os.close(fd)
        raise


def _opening(stream: int, head: bytes, data: Buffer | None) -> Piece:
    """The HEAD frame of a message, with its data if that is small."""
    if data is None:
        return HEADER.pack(HEAD, 0, stream, len(head)) + head, 0, 0
    return b"".join((HEADER.pack(HEAD, len(head), stream, len(head) + len(data)), head, data)), 0, 0
