"""Framing: splits one byte stream into frames, each of which belongs to a numbered stream.

A frame is a 16-byte header (kind, head, stream, length) and a payload. A small message is one HEAD frame: `head` bytes
of JSON, then all its data. A large message is a HEAD frame with only JSON (`head` is 0), followed by DATA frames whose
payload is received directly into memory that the receiver provides.
"""

from __future__ import annotations

import contextlib
import struct

from skyfab.errors import ProtocolError

TYPE_CHECKING = False  # importing `typing` takes longer than this whole package, and delays an agent's first start
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Final, Protocol

    RecvInto = Callable[[memoryview], int | None]
    """Returns how many bytes it stored: 0 at end of file; None (or BlockingIOError) when nothing is available now."""
else:
    Protocol = object

HEADER: Final = struct.Struct("<BxHIQ")
COUNT: Final = struct.Struct("<Q")

HELLO: Final = 1
"""JSON: the sender's description, and how many frames it has received. The first frame of every connection."""
ACK: Final = 2
"""The number of sequenced frames that have been received."""
PING: Final = 3
PONG: Final = 4
BYE: Final = 5
"""The session ends on purpose: no lease, no reconnect."""
HEAD: Final = 16
"""JSON: the start of a message. This kind and higher ones are sequenced: the sender keeps them until they are
acknowledged, and sends them again after a reconnect."""
DATA: Final = 17
CREDIT: Final = 18
"""How many more bytes of DATA may be sent on this stream."""

CHUNK: Final = 256 * 1024
"""A DATA payload. Small, so that a heartbeat never waits long behind one; four times that where much is in flight."""
LIMIT: Final = 4 * 1024 * 1024
"""The largest payload that is accepted."""
KINDS: Final = frozenset({HELLO, ACK, PING, PONG, BYE, HEAD, DATA, CREDIT})

_SPARED: Final = 64 * 1024
"""Smaller memory is not kept."""
_AREAS: Final = 4

Buffer = bytes | bytearray | memoryview


def frame(kind: int, stream: int = 0, payload: bytes = b"", head: int = 0) -> bytes:
    """A whole frame as one bytes object, so that it is sent in one write."""
    return HEADER.pack(kind, head, stream, len(payload)) + payload


def head_frame(stream: int, head: bytes, parts: Sequence[Buffer] | None = None) -> bytes:
    """The HEAD frame of a message with all its data, or without it: then DATA frames follow."""
    if parts is None:
        return HEADER.pack(HEAD, 0, stream, len(head)) + head
    size = len(head) + sum(map(len, parts))
    return b"".join((HEADER.pack(HEAD, len(head), stream, size), head, *parts))


def data_header(stream: int, length: int) -> bytes:
    return HEADER.pack(DATA, 0, stream, length)


class Receiver(Protocol):
    """Callbacks for received frames."""

    def place(self, stream: int, length: int) -> memoryview:
        """The memory into which the payload of a DATA frame is received."""

    def arrived(self, kind: int, stream: int, payload: memoryview, head: int) -> None:
        """A frame is complete. Its payload is valid only during this call, unless `place` provided the memory."""


class Spare:
    """Memory for payloads that are passed on. It is used again, because the system has to clear new memory."""

    def __init__(self) -> None:
        self._areas: list[bytearray] = []

    def take(self, length: int) -> memoryview:
        for area in self._areas:
            if len(area) >= length > 0:
                with contextlib.suppress(BufferError):  # it cannot be resized while a memoryview refers to it
                    area.append(area.pop())
                    return memoryview(area)[:length]
        area = bytearray(length)
        if length >= _SPARED:
            self._areas = [*self._areas[1 - _AREAS :], area]
        return memoryview(area)


class Reader:
    """Incremental frame parser: each `pump` makes one read and delivers the frames that it completes.

    It does not block unless `recv_into` does, and keeps its state in the middle of a frame.
    """

    def __init__(self, receiver: Receiver, *, size: int = 64 * 1024) -> None:
        self._receiver = receiver
        self._scratch = memoryview(bytearray(size))
        self._start = 0
        self._end = 0
        self._frame = (0, 0, 0)
        """Kind, stream and head of the frame whose payload is being received into `_payload`."""
        self._payload: memoryview | None = None
        self._filled = 0

    def pump(self, recv_into: RecvInto) -> bool:
        """Reads once and delivers every frame that is now complete. Returns False at end of file.

        Raises whatever `recv_into` raises (BlockingIOError when there is nothing), and
        ProtocolError when the bytes are not frames.
        """
        if self._payload is not None:
            got = recv_into(self._payload[self._filled :])
            if got is None:
                raise BlockingIOError
            self._filled += got
            if self._filled == len(self._payload):
                payload, self._payload = self._payload, None
                kind, stream, head = self._frame
                self._receiver.arrived(kind, stream, payload, head)
            return got > 0
        scratch = self._scratch
        got = recv_into(scratch[self._end :] if self._end else scratch)
        if got is None:
            raise BlockingIOError
        self._end += got
        if self._end == got:
            # The common case: the read returned exactly one frame.
            kind, head, stream, length = HEADER.unpack_from(scratch)
            if got == HEADER.size + length and head <= length and kind in KINDS and kind != DATA:
                self._end = 0
                self._receiver.arrived(kind, stream, scratch[HEADER.size : got], head)
                return True
        self._parse()
        return got > 0

    def _parse(self) -> None:
        scratch, receiver = self._scratch, self._receiver
        while (have := self._end - self._start) >= HEADER.size:
            kind, head, stream, length = HEADER.unpack_from(scratch, self._start)
            if kind not in KINDS or length > LIMIT or head > length:
                raise ProtocolError(f"not a frame: kind {kind}, length {length}, head {head}")
            self._start += HEADER.size
            have -= HEADER.size
            if kind != DATA and length <= have:
                view = scratch[self._start : self._start + length]
                self._start += length
                receiver.arrived(kind, stream, view, head)
            else:
                self._frame = (kind, stream, head)
                if not self._land(length, have):
                    return
        rest = self._end - self._start
        if rest and self._start:
            scratch[:rest] = bytes(scratch[self._start : self._end])
        self._start, self._end = 0, rest

    def _land(self, length: int, have: int) -> bool:
        """Copies a payload to its destination. Returns False if later reads must receive the rest there."""
        kind, stream, head = self._frame
        place = self._receiver.place(stream, length) if kind == DATA else memoryview(bytearray(length))
        if len(place) != length:
            raise ProtocolError(f"{length} bytes of data where {len(place)} were announced")
        take = min(length, have)
        place[:take] = self._scratch[self._start : self._start + take]
        self._start += take
        if take == length:
            self._receiver.arrived(kind, stream, place, head)
            return True
        self._payload, self._filled = place, take
        self._start = self._end = 0
        return False
