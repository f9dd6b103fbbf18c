"""A seat: one rank process as the agent sees it, and the calls it has been given.

The agent relays frames between the connection and the seat's socket without looking into user data.
Calls run in the order in which they came; the first one without an answer is the one that runs.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from skyfab.agent.logs import LogPipe
from skyfab.protocol import messages
from skyfab.protocol.blobs import inline_size
from skyfab.protocol.frames import DATA, HEAD, HEADER, Reader, frame
from skyfab.protocol.streams import SMALL, Buffer, Mux

_BACKLOG: Final = 2 * 1024 * 1024
"""Bytes of an answer that may wait for the connection before the rank is left waiting."""


@dataclass(slots=True)
class Running:
    """A call that has been handed to the seat and not answered."""

    stream: int
    timeout: float | None
    deadline: float | None = None
    cancelled: bool = False
    verdict: str = ""
    """Why the process was ended on purpose: timeout or cancelled."""


class Owner(Protocol):
    """What a seat needs of its agent."""

    mux: Mux

    def now(self) -> float: ...
    def flush(self) -> None: ...
    def kill(self, seat: Seat) -> None: ...
    def writable(self, seat: Seat, wanted: bool) -> None: ...
    def readable(self, seat: Seat, wanted: bool) -> None: ...


class Seat:
    """One rank process: its socket, its logs, its calls."""

    def __init__(self, owner: Owner, number: int, name: str, logs: Sequence[LogPipe]) -> None:
        self._owner = owner
        self.number = number
        """Names the process for the zygote; a seat's name can be taken again."""
        self.name = name
        self.logs = logs
        self.socket, self.other = socket.socketpair()
        self.socket.setblocking(False)
        self.functions: set[str] = set()
        self.calls: deque[Running] = deque()
        self.events = 0
        """What the agent's selector watches for."""
        self.paused = False
        self.condemned = False
        self._reader = Reader(self)
        self._out: deque[tuple[Buffer, int, int]] = deque()
        self._stalled: deque[tuple[int, int, bytes]] = deque()
        """Frames of answers that wait for the logs before them."""
        self._answer: tuple[int, bytes | None, int] | None = None
        """The answer under way: stream, head unless that has been sent, missing bytes."""

    def fileno(self) -> int:
        return self.socket.fileno()

    # ---- towards the rank

    def deliver(self, kind: int, stream: int, payload: Buffer) -> None:
        """Passes a frame on. Data gives its credit back once the rank's socket has taken it."""
        if kind == DATA:
            self._out.append((HEADER.pack(DATA, stream, len(payload)), 0, 0))
            self._out.append((payload, stream, len(payload)))
        else:
            self._out.append((frame(kind, stream, bytes(payload)), 0, 0))
        if len(self._out) <= 2:
            self.flush()

    def give(self, call: Running) -> None:
        """Notes a call whose frames are being delivered."""
        self.calls.append(call)
        if len(self.calls) == 1:
            self._begin()

    def flush(self) -> None:
        try:
            while self._out:
                buffers = [entry[0] for entry, _ in zip(self._out, range(32), strict=False)]
                self._consume(self.socket.sendmsg(buffers))
        except BlockingIOError:
            self._owner.writable(self, True)
            return
        except OSError:  # the rank is gone; its end is told by the zygote
            self._out.clear()
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

    def read(self) -> bool:
        """Takes what the rank has to say. False when it has hung up."""
        try:
            return self._reader.pump(self.socket.recv_into)
        except BlockingIOError:
            return True
        except OSError:
            return False

    def place(self, stream: int, length: int) -> memoryview:
        return memoryview(bytearray(length))

    def arrived(self, kind: int, stream: int, payload: memoryview) -> None:
        if self._stalled or (kind == HEAD and not self._silent()):
            self._stalled.append((kind, stream, bytes(payload)))
            self._pause()
        else:
            self._pass_on(kind, stream, payload)

    def _silent(self) -> bool:
        """What the process has written so far is on its way: it must come before the answer that follows."""
        for log in self.logs:
            log.drain()
        if any(log.waiting for log in self.logs):
            self._owner.flush()
        return not any(log.waiting for log in self.logs)

    def _pass_on(self, kind: int, stream: int, payload: Buffer) -> None:
        if kind == HEAD:
            self._open(stream, bytes(payload))
        elif kind == DATA and self._answer is not None:
            self._relay(stream, payload)

    def _pause(self) -> None:
        self.paused = True
        self._owner.readable(self, False)

    def _open(self, stream: int, head: bytes) -> None:
        missing = inline_size(getattr(messages.decode(head), "parts", ()))
        self._answer = (stream, head, missing)
        if missing > SMALL or not missing:
            self._owner.mux.send(stream, head)
            self._answer = (stream, None, missing)
        if not missing:
            self._close()

    def _relay(self, stream: int, payload: Buffer) -> None:
        assert self._answer is not None
        _, head, missing = self._answer
        missing -= len(payload)
        self._answer = (stream, None, missing)
        mux = self._owner.mux
        if head is not None:  # a small answer is one frame: it leaves in one piece
            mux.send(stream, head, (payload,))
        else:
            mux.send_data(stream, payload)
        if not missing:
            self._close()
        elif mux.queued(stream) > _BACKLOG:
            self._pause()

    def _close(self) -> None:
        """The answer is complete: the next call, if any, has begun."""
        assert self._answer is not None
        stream, self._answer = self._answer[0], None
        if self.calls and self.calls[0].stream == stream:
            self.calls.popleft()
        if self.calls:
            self._begin()

    def _begin(self) -> None:
        call = self.calls[0]
        if call.timeout is not None:
            call.deadline = self._owner.now() + call.timeout
        if call.cancelled:
            self.condemn("cancelled")

    def resume(self) -> None:
        """Goes on where it paused: the logs are out, and the connection has taken enough of a large answer."""
        if not self.paused or (self._stalled and not self._silent()):
            return
        while self._stalled:
            kind, stream, payload = self._stalled.popleft()
            if kind == HEAD and not self._silent():
                self._stalled.appendleft((kind, stream, payload))
                return
            self._pass_on(kind, stream, payload)
        if self._answer is None or self._owner.mux.queued(self._answer[0]) < _BACKLOG // 2:
            self.paused = False
            self._owner.readable(self, True)

    # ---- endings

    def check_time(self, now: float) -> float | None:
        """Ends a call that is past its time; else says when to look again."""
        deadline = self.calls[0].deadline if self.calls else None
        if deadline is not None and deadline <= now:
            self.condemn("timeout")
            return None
        return deadline

    def cancel(self, stream: int) -> None:
        for place, call in enumerate(self.calls):
            if call.stream == stream:
                call.cancelled = True
                if not place:
                    self.condemn("cancelled")

    def condemn(self, verdict: str) -> None:
        """Ends the process for the sake of the call that runs."""
        if self.calls:
            self.calls[0].deadline = None
            self.calls[0].verdict = self.calls[0].verdict or verdict
        self.kill()

    def kill(self) -> None:
        """Ends the process and its group."""
        self.condemned = True
        self._owner.kill(self)

    def ended(self, exitcode: int, describe: Callable[[int], str]) -> None:
        """The process is gone: answers the call that ran, and hands back those that had not begun."""
        with contextlib.suppress(OSError):
            while self._reader.pump(self.socket.recv_into):
                pass
        for log in self.logs:
            log.drain()
        while self._stalled:
            self._pass_on(*self._stalled.popleft())
        mux = self._owner.mux
        for place, call in enumerate(self.calls):
            if self._answer is not None and self._answer[0] == call.stream:
                mux.forget(call.stream)
            if place:
                answer = messages.Ended(why="unstarted")
            elif call.verdict:
                answer = messages.Ended(why=call.verdict, exitcode=exitcode)
            else:
                answer = messages.Ended(why="died", text=describe(exitcode), exitcode=exitcode)
            mux.send(call.stream, answer.encode())
        self.calls.clear()
        mux.send(0, messages.Exited(seat=self.name, text=describe(exitcode), exitcode=exitcode).encode())

    def close(self) -> None:
        self.socket.close()
        self.other.close()
        for log in self.logs:
            log.close()


