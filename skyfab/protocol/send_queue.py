"""Send queues for bulk data, one per stream: round-robin between streams, with credit-based flow control for each."""

from __future__ import annotations

from collections import deque

from skyfab.protocol.frames import Buffer, data_header

TYPE_CHECKING = False  # see frames.py
if TYPE_CHECKING:
    from typing import Final

CREDIT_WINDOW: Final = 16 * 1024 * 1024
"""DATA bytes that one stream may send before its receiver has consumed them."""


class _Outgoing:
    """The queued data and the credit of one stream."""

    __slots__ = ("credit", "last", "pending", "size")

    def __init__(self) -> None:
        self.last = False
        """No more data will be added."""
        self.pending: deque[memoryview] = deque()
        self.size = 0
        """Bytes in `pending`."""
        self.credit = CREDIT_WINDOW


class SendQueue:
    """The send queues of all streams of a connection."""

    def __init__(self) -> None:
        self.streams: dict[int, _Outgoing] = {}
        """Those that have or had bulk data, until they end."""
        self.turns: deque[int] = deque()
        """Streams with queued data, in round-robin order. May contain streams that `forget` has removed since."""

    def add(self, stream: int, data: Buffer) -> None:
        """Queues data. It is not copied."""
        if len(data):
            self._append(stream, memoryview(data).cast("B"))

    def _append(self, stream: int, view: memoryview) -> None:
        outgoing = self.streams.get(stream)
        if outgoing is None:
            outgoing = self.streams[stream] = _Outgoing()
        if not outgoing.pending:
            self.turns.append(stream)
        outgoing.pending.append(view)
        outgoing.size += len(view)

    def queued(self, stream: int) -> int:
        """Bytes of this stream that are queued."""
        outgoing = self.streams.get(stream)
        return outgoing.size if outgoing else 0

    def grant(self, stream: int, credit: int) -> None:
        """The receiver accepts `credit` more bytes on this stream."""
        outgoing = self.streams.get(stream)
        if outgoing is not None:
            outgoing.credit += credit

    def forget(self, stream: int) -> None:
        """Removes the stream and drops its queued data."""
        self.streams.pop(stream, None)

    def mark_end(self, stream: int) -> None:
        """Queues an empty chunk, behind all data of the stream."""
        self._append(stream, memoryview(b""))

    def finish(self, stream: int) -> None:
        """Marks the end of the stream's data: the stream is removed once all of it is sent."""
        outgoing = self.streams.get(stream)
        if outgoing is not None and outgoing.pending:
            outgoing.last = True
        else:
            self.forget(stream)

    @property
    def is_ready(self) -> bool:
        """Whether some stream has data and credit."""
        return any(o.credit > 0 for stream in self.turns if (o := self.streams.get(stream)) is not None)

    def next(self, limit: int) -> tuple[bytes, memoryview] | None:
        """The next chunk, of at most `limit` bytes, and its header; None if no stream has data and credit."""
        for _ in range(len(self.turns)):
            stream = self.turns.popleft()
            outgoing = self.streams.get(stream)
            if outgoing is None or not outgoing.pending:
                continue
            if outgoing.credit <= 0:
                self.turns.append(stream)
                continue
            view = outgoing.pending[0]
            size = min(len(view), limit, outgoing.credit)
            if size == len(view):
                outgoing.pending.popleft()
            else:
                outgoing.pending[0] = view[size:]
            outgoing.credit -= size
            outgoing.size -= size
            if outgoing.pending:
                self.turns.append(stream)
            elif outgoing.last:
                self.forget(stream)
            return data_header(stream, size), view[:size]
        return None
