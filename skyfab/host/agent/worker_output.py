"""Forwards a worker's replies and output in order: a reply is never sent before what was written earlier."""

from __future__ import annotations

import contextlib
import io
import select
from collections import deque

from skyfab.errors import ProtocolError
from skyfab.host.agent.poller import READ
from skyfab.protocol import messages
from skyfab.protocol.blobs import inline_size
from skyfab.protocol.frames import BYE, DATA, HEAD, HEADER, Reader

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from typing import Any, Final

    from skyfab.protocol.frames import Buffer

_BACKLOG: Final = 2 * 1024 * 1024
"""Bytes of a reply that may be queued for the connection before the agent stops reading from the worker."""


class WorkerOutput:
    """Forwards from one worker to the client."""

    def __init__(self, worker: Any, owner: Any) -> None:
        """`worker` is its `WorkerHandle`, `owner` the `Workers` that it belongs to."""
        self._worker = worker
        self._owner = owner
        self._logs = worker.logs
        self._recv_into = io.FileIO(worker.source, closefd=False).readinto
        self._poll = select.poll()
        for log in worker.logs:
            self._poll.register(log.source, select.POLLIN)
        self._reader = Reader(self)
        self._stalled: deque[tuple[tuple[int, ...], int, int, bytes, int]] = deque()
        """Frames of replies that wait, each with the log positions that must be forwarded before it."""
        self._answer: tuple[int, int] | None = None
        """The large reply in progress: its stream, and how many bytes are missing."""

    def read(self) -> None:
        """Reads frames from the worker."""
        try:
            if self._reader.pump(self._recv_into):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        except ProtocolError:  # user code wrote to our pipe: only this worker must be killed
            self._worker.kill()
        self._owner.poller.drop(self._worker.source)  # the pipe is closed

    def place(self, stream: int, length: int) -> memoryview:
        return memoryview(bytearray(length))

    def _relay_reply(self, stream: int, payload: memoryview, head: int) -> bool:
        """Fast path: sends a small reply at once. Returns False if anything must be sent before it."""
        worker = self._worker
        if (
            self._stalled
            or worker.stopping
            or ((not worker.calls or worker.calls[0].stream != stream) and stream not in worker.exchanges)
            or self._is_written()
        ):
            return False
        frame = HEADER.pack(HEAD, head, stream, len(payload)) + payload
        if self._owner.behind or not self._owner.relay(frame):
            return False
        worker.answered(stream)
        return True

    def arrived(self, kind: int, stream: int, payload: memoryview, head: int) -> None:
        end = head or len(payload)
        if kind == HEAD and bytes(payload[end - 1 : end]) != b"}":  # passed on, it would end the connection
            raise ProtocolError("not a message")
        if kind == HEAD and head and self._relay_reply(stream, payload, head):
            return
        marks: tuple[int, ...] = ()
        if kind == BYE:  # the worker exits after its next reply
            self._worker.stopping = True
            return
        if kind == HEAD and not stream:
            self._owner.mux.send(0, messages.expect(messages.Importing, bytes(payload)).encode())
            return
        if kind == HEAD:
            if self._is_written():
                for log in self._logs:
                    self._owner.drain(log)
            if any(log.waiting for log in self._logs):
                marks = tuple(log.written for log in self._logs)
        if not self._stalled and self._are_sent(marks):
            self._pass_on(kind, stream, payload, head)
        else:
            if kind == HEAD:  # an invalid message is refused now: later its ProtocolError would end the agent
                inline_size(getattr(messages.decode(bytes(payload[: head or None])), "parts", ()))
            self._stalled.append((marks, kind, stream, bytes(payload), head))
            self._pause()

    def _is_written(self) -> bool:
        """Whether the pipes of the logs have more. One that the function has closed is ready for ever."""
        return any(events & select.POLLIN for _, events in self._poll.poll(0))

    def _are_sent(self, marks: tuple[int, ...]) -> bool:
        """Whether the logs are forwarded up to these positions, so that the reply may follow; flushes if not."""
        if not marks or all(log.is_sent(mark) for log, mark in zip(self._logs, marks, strict=True)):
            return True
        self._owner.flush()
        return all(log.is_sent(mark) for log, mark in zip(self._logs, marks, strict=True))

    def _pass_on(self, kind: int, stream: int, payload: Buffer, head: int) -> None:
        mux = self._owner.mux
        if kind == DATA:
            self._relay(stream, payload)
        elif head:
            self._worker.announce_end()
            mux.send(stream, bytes(payload[:head]), (payload[head:],))
            self._worker.answered(stream)
        elif kind == HEAD:
            content = bytes(payload)
            missing = inline_size(getattr(messages.decode(content), "parts", ()))
            if not missing:
                self._worker.announce_end()
            mux.send(stream, content, large=True)
            if missing:
                self._answer = (stream, missing)
            else:
                self._worker.answered(stream)

    def _pause(self) -> None:
        self._owner.stuck.add(self._worker)
        self._owner.poller.drop(self._worker.source)

    def _relay(self, stream: int, payload: Buffer) -> None:
        if self._answer is None:
            return
        missing = self._answer[1] - len(payload)
        self._answer = (stream, missing)
        if missing <= 0:
            self._worker.announce_end()
        self._owner.mux.send_data(stream, payload)
        if missing <= 0:
            self._answer = None
            self._owner.mux.finish(stream)
            self._worker.answered(stream)
        elif self._owner.mux.queued(stream) > _BACKLOG:
            self._pause()

    def resume(self) -> bool:
        """Continues if the logs are forwarded and the connection has taken enough of a large reply.

        Returns whether it forwarded anything or resumed reading.
        """
        before = len(self._stalled)
        while self._stalled and self._are_sent(self._stalled[0][0]):
            self._pass_on(*self._stalled.popleft()[1:])
        if self._stalled or (self._answer is not None and self._owner.mux.queued(self._answer[0]) >= _BACKLOG // 2):
            return len(self._stalled) < before
        self._owner.stuck.discard(self._worker)
        self._owner.poller.add(self._worker.source, READ, self.read)
        return True

    def finish(self) -> int | None:
        """The process has exited: forwards all it sent. Returns the stream of an incomplete reply, or None."""
        with contextlib.suppress(OSError, ProtocolError):
            while self._reader.pump(self._recv_into):
                pass
        for log in self._logs:
            log.drain()
        while self._stalled:
            self._pass_on(*self._stalled.popleft()[1:])
        return self._answer[0] if self._answer is not None else None
