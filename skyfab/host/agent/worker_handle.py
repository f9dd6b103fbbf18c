"""The agent's handle of one worker process: its pipes, its queue of calls, and how it is stopped.

The agent relays frames between the connection and the worker's pipes without decoding user data. Calls run in the
order in which they were received; the first one without a reply is the one that runs.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections import deque

from skyfab.host.agent.poller import WRITE
from skyfab.host.agent.worker_output import WorkerOutput
from skyfab.protocol import messages
from skyfab.protocol.frames import data_header, head_frame
from skyfab.protocol.pipes import widen

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any, Final

    from skyfab.host.agent.logs import LogPipe
    from skyfab.protocol.frames import Buffer

    Piece = tuple[Buffer, int, int]
    """Bytes for the worker; and the stream and length to credit to the client once the worker has taken them."""

_LAST_WORDS: Final = 2.0
"""Seconds from SIGTERM to SIGKILL."""


class Running:
    """A call that has been given to the worker and has no reply yet."""

    __slots__ = ("deadline", "function", "held", "large", "stream", "timeout", "verdict")

    def __init__(self, stream: int, timeout: float | None, function: str = "") -> None:
        self.stream = stream
        self.timeout = timeout
        self.function = function
        self.deadline: float | None = None
        self.held: list[Piece] = []
        """Its frames, held until it begins."""
        self.large = False
        """Its data follows in DATA frames, under flow control."""
        self.verdict = ""
        """Why the process was terminated on purpose: timeout or cancelled."""


class WorkerHandle:
    """One worker process: its pipes, its logs, its calls."""

    def __init__(
        self, owner: Any, number: int, name: str, generation: int, logs: Sequence[LogPipe], rank: int = 0
    ) -> None:
        """`owner` has all workers: the `Workers` of host/agent/workers.py."""
        self._owner = owner
        self.number = number
        """Identifies the process for the zygote; a worker's name can be used again."""
        self.group = 0
        """The process group that the worker leads, once it is known."""
        self.name = name
        self.generation = generation
        self.rank = rank
        self.logs = logs
        rank_in, self.sink, self.source, rank_out = _pipes()
        self.functions: set[str] = set()
        """The functions that the process has."""
        self.calls: deque[Running] = deque()
        self.exchanges: dict[int, tuple[Running | None, bool]] = {}
        """Exchanges without a reply, by stream: their call, and whether their data follows in DATA frames."""
        self.rank_ends = (rank_in, rank_out)
        for fd in (self.source, self.sink):
            os.set_blocking(fd, False)
            widen(fd)
        self.pipelined = False
        """Calls are sent to the process as they arrive. They are not taken back."""
        self.stopping = False
        self._kill_at: float | None = None
        """When it is killed, if it has not exited by then."""
        self._out: deque[Piece] = deque()
        self.output = WorkerOutput(self, owner)

    # ---- sending to the worker

    def tell(self, stream: int, head: bytes, data: Buffer | None) -> None:
        """Queues the HEAD frame of a message, with its data if that is small."""
        self._queue(self._out, _opening(stream, head, data))

    def tell_data(self, stream: int, data: Buffer) -> None:
        """Queues data of a message that is not a call."""
        self._queue(self._out, (data_header(stream, len(data)), 0, 0), (data, 0, 0))

    def forget(self, known: Iterable[str]) -> None:
        """Has the process delete functions that are no longer `known`. One that a call uses is deleted later."""
        unused = self.functions.difference(known, (call.function for call in self.calls))
        self.functions -= unused
        if unused:
            self.tell(0, messages.Forget(digests=[*unused]).encode(), b"")

    def give(self, call: Running, head: bytes, data: Buffer | None) -> None:
        """Accepts a call. It is sent to the worker once those before it have replies; until then it can be taken back.
        A pipelined worker is sent it at once.

        A call that arrives while the process is stopping is held until the process has exited: if it were returned
        earlier, the client would send it again at once.
        """
        call.large = data is None
        self.calls.append(call)
        if (len(self.calls) > 1 and not self.pipelined) or self.stopping:
            call.held.append(_opening(call.stream, head, data))
            return
        if call.timeout is not None and len(self.calls) == 1:
            self._begin()
        piece = _opening(call.stream, head, data)
        if self._out or data is None:
            self._queue(self._out, piece)
        else:
            self._write(piece[0])

    def exchange(self, stream: int, about: messages.Exchange, head: bytes, data: Buffer | None) -> None:
        """Passes on an exchange with a call. It is held back as long as the call is."""
        call = next((call for call in self.calls if call.stream == about.call), None)
        if (call is None and about.call) or self.stopping:
            self._owner.mux.send(stream, messages.Yielded().encode())
            if data is None:
                self._owner.abandon(stream)
            return
        self.exchanges[stream] = (call, data is None)
        self._queue((call and call.held) or self._out, _opening(stream, head, data))
        if about.what == "close" and call is self.calls[0] and not call.held:
            self.flush()
            self._owner.interrupt(self)

    def _write(self, frame: Buffer) -> None:
        """Writes directly to the worker; nothing may be queued before it."""
        try:
            sent = os.write(self.sink, frame)
        except OSError:
            sent = 0  # full or closed: `flush` handles both
        if sent < len(frame):
            self._queue(self._out, (bytes(frame[sent:]), 0, 0))

    def give_data(self, stream: int, data: Buffer) -> None:
        """More data of a large call."""
        pieces: tuple[Piece, ...] = ((data_header(stream, len(data)), 0, 0), (data, stream, len(data)))
        for call in self.calls:
            if call.stream == stream:
                self._queue(call.held or self._out, *pieces)
        if stream in self.exchanges:
            about = self.exchanges[stream][0]
            self._queue((about and about.held) or self._out, *pieces)

    def _queue(self, line: list[Piece] | deque[Piece], *pieces: Piece) -> None:
        line.extend(pieces)
        if line is self._out and self.sink not in self._owner.poller:
            self._owner.dirty.add(self)  # frames that arrive together are written together

    def flush(self) -> None:
        try:
            while self._out:
                buffers = [entry[0] for entry in itertools.islice(self._out, 32)]
                self._consume(os.writev(self.sink, buffers))
        except BlockingIOError:
            self._owner.poller.add(self.sink, WRITE, self.flush)
            return
        except OSError:  # the worker has exited; the zygote reports it
            self._out.clear()
        self._owner.poller.drop(self.sink)

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
        """A reply is complete: begins the next call, if any, unless the process is stopping."""
        if stream in self.exchanges:
            if self.exchanges.pop(stream)[1]:
                self._owner.mux.finish(stream)
            return
        call = self.calls[0] if self.calls else None
        if call is not None and call.stream != stream and self.pipelined:  # it runs several at a time
            call = next((one for one in self.calls if one.stream == stream), None)
        if call is not None and call.stream == stream:
            self.calls.remove(call)
            if call.large:
                self._owner.mux.finish(stream)
            if not self.stopping:
                self._owner.timed.discard(self)
        if self.stopping:
            self._end_after_answer()
        elif self.calls:
            self._begin()

    def _end_after_answer(self) -> None:
        """Ends a stopping process that has replied: at once if SIGTERM was sent, else after time to exit by itself."""
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

    # ---- stopping

    def check_time(self, now: float) -> float | None:
        """Ends a call that has timed out, or kills a process whose grace period is over; else returns when to check."""
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
        """Stops a call; if it already runs, by terminating the process."""
        if self.calls and self.calls[0].stream == stream and not self.calls[0].held:
            self.stop("cancelled")
        else:
            self.take_back(stream, "cancelled")

    def end_soon(self, seconds: float) -> None:
        """Gives the running call a deadline: another rank has failed, and it may wait for that one."""
        if self.calls:
            self.calls[0].verdict = "cancelled"
            self.calls[0].deadline = self._owner.now() + seconds
            self._owner.timed.add(self)

    def take_back(self, stream: int, why: str) -> None:
        """Removes a call that has not begun, and replies Ended."""
        for call in list(self.calls):
            if call.stream == stream and call.held:
                self.calls.remove(call)
                self._owner.abandon(stream)
                self._owner.mux.send(stream, messages.Ended(why=why).encode())

    def stop(self, verdict: str) -> None:
        """Terminates the process in order to end the running call."""
        if self.calls:
            self.calls[0].deadline = None
            self.calls[0].verdict = self.calls[0].verdict or verdict
        if self._kill_at is None:  # it may be `stopping`, by its own will
            self.stopping = True
            self._kill_at = self._owner.now() + _LAST_WORDS
            self._owner.timed.add(self)
            self._owner.kill(self, signal.SIGTERM)

    def shut_down(self) -> bool:
        """Closes the pipe to an idle process, so that it exits by itself. False: it is not idle and must be killed."""
        if self.calls or self._out or self.stopping:
            return False
        self.stopping = True
        self._kill_at = self._owner.now() + _LAST_WORDS
        self._owner.timed.add(self)
        nowhere = os.open(os.devnull, os.O_WRONLY)  # keeps the descriptor number in use: the poller may refer to it
        os.dup2(nowhere, self.sink)
        os.close(nowhere)
        return True

    def announce_end(self) -> None:
        """Sends Exited before the end of a reply, so that the client sends no further call to a stopping process."""
        if self.stopping:
            self._owner.mux.send(0, messages.Exited(worker=self.name, generation=self.generation).encode())

    def kill(self) -> None:
        """Kills the process and its group."""
        self.stopping = True
        self._owner.kill(self)

    def ended(self, exitcode: int | None, text: str) -> None:
        """The process has exited: replies to the call that ran, and returns those that had not begun.

        The exit code is None if the process could not be started.
        """
        self.stopping = True  # a reply that is read only now must not begin the next call
        self._kill_at = None
        broken = self.output.finish()
        mux = self._owner.mux
        # Before the replies: when those arrive, the client must know that the worker is free.
        mux.send(0, messages.Exited(worker=self.name, generation=self.generation).encode())
        for call in self.calls:
            if call.stream == broken:
                mux.forget(call.stream)
            if call.held:
                answer = messages.Ended(why="unstarted")
            elif call.verdict:
                limit = f"{call.timeout:g} s" if call.verdict == "timeout" else ""
                answer = messages.Ended(why=call.verdict, text=limit, exitcode=exitcode)
            else:
                answer = messages.Ended(why="died", text=text, exitcode=exitcode)
            mux.send(call.stream, answer.encode())
            mux.finish(call.stream)
            self._owner.abandon(call.stream)
        for stream in self.exchanges:
            if stream == broken:
                mux.forget(stream)
            mux.send(stream, messages.Yielded().encode())
            mux.finish(stream)
            self._owner.abandon(stream)
        self.calls.clear()
        self.exchanges.clear()

    def close(self) -> None:
        for fd in (self.source, self.sink):
            os.close(fd)


def _pipes() -> tuple[int, int, int, int]:
    """Creates two pipes; if there are descriptors for only one, closes that and raises OSError."""
    one = os.pipe()
    try:
        return (*one, *os.pipe())
    except OSError:
        for fd in one:
            os.close(fd)
        raise


def _opening(stream: int, head: bytes, data: Buffer | None) -> Piece:
    """The HEAD frame of a message, with its data if that is small."""
    return head_frame(stream, head, None if data is None else (data,)), 0, 0
