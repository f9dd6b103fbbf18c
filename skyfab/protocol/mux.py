"""Multiplexer: many message streams over one connection, with acknowledgement and resend across reconnects.

`Mux` is the state of one side. It does no I/O: the owner passes in functions that read and write. Frames that carry
messages are numbered. Each side keeps what it has sent until the peer acknowledges it, and after a reconnect resends
only what the peer has not received. Control frames and small messages are sent before bulk data; streams with bulk
data are served round-robin.
"""

from __future__ import annotations

import itertools
import time
from collections import deque

from skyfab.errors import ProtocolError
from skyfab.protocol import frames
from skyfab.protocol.frames import ACK, BYE, CHUNK, COUNT, CREDIT, DATA, HEAD, HEADER, HELLO, PING, PONG, Buffer, frame
from skyfab.protocol.send_queue import CREDIT_WINDOW, SendQueue

TYPE_CHECKING = False  # see frames.py
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Final, Protocol

    Send = Callable[[Sequence["Buffer"]], int]
else:
    Protocol = object

SMALL: Final = 32 * 1024
"""Messages up to this size are sent in one write, before bulk data."""
ACK_BYTES: Final = 1024 * 1024
ACK_FRAMES: Final = 32
"""How much is received before it is acknowledged without a request. A sender whose window is full requests an
acknowledgement with a PING."""
MOST_UNACKED: Final = 64 * 1024 * 1024
"""Bytes of small messages that may be unacknowledged. More than a connection ever has in flight, so exceeding it is a
protocol error."""
_PIECES: Final = 256
"""Buffers in one write. The system accepts at most 1,024."""


class Handler(Protocol):
    """Callbacks of a Mux, implemented by its owner."""

    def hello(self, payload: bytes) -> None:
        """The peer's HELLO was received on a new connection."""

    def opened(self, stream: int, head: bytes, data: memoryview | None) -> None:
        """A message begins on this stream. `data` is all data of a small message, valid during this call; else None."""

    def place(self, stream: int, length: int) -> memoryview:
        """The memory into which the next bytes of this stream are received."""

    def data(self, stream: int, view: memoryview) -> None:
        """Those bytes were received. Call `Mux.used` once they are consumed, so that the peer may send as many more."""

    def bye(self, reason: str) -> None:
        """The peer ends the session for good."""


class Window:
    """How many bytes may be in flight: enough to use the bandwidth, too few to queue up along the path.

    On a slow link with deep buffers, a cancel would otherwise wait behind megabytes of data.
    """

    FLOOR: Final = 64 * 1024
    CEILING: Final = 32 * 1024 * 1024

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Starts over for a new connection, whose latency and bandwidth may differ."""
        self.size = self.FLOOR
        self._base = float("inf")
        self._changed = 0.0

    def observe(self, elapsed: float, now: float) -> None:
        """A frame was acknowledged `elapsed` seconds after it was sent."""
        self._base = min(self._base, elapsed)
        if now - elapsed < self._changed:
            return  # the frame was sent before the last change of the window's size
        queued = elapsed - self._base
        if queued < 0.05:
            self.size = min(2 * self.size, self.CEILING)
            self._changed = now
        elif queued > 0.15:  # shrink to about what the path carries in its best round-trip time
            self.size = max(int(self.size * (self._base + 0.1) / elapsed), self.FLOOR)
            self._changed = now

    @property
    def chunk(self) -> int:
        return min(4 * CHUNK, max(8 * 1024, self.size // 8))


class _Sent:
    """A chunk of bulk data that the peer has not acknowledged."""

    __slots__ = ("at", "chunk", "header")

    def __init__(self, header: bytes, chunk: memoryview, at: float) -> None:
        self.header = header
        self.chunk = chunk
        self.at = at


class Mux:
    """One side of a multiplexed session. Not thread-safe: the owner holds a lock."""

    def __init__(self, handler: Handler, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._handler = handler
        self._clock = clock
        self._reader = frames.Reader(self)
        self._control: deque[bytes] = deque()
        self._urgent: deque[bytes] = deque()
        self._send_queue = SendQueue()
        self._unacked: deque[bytes | _Sent] = deque()
        self._replay: deque[bytes | _Sent] = deque()
        self._batch: deque[Buffer] = deque()
        self._used: dict[int, int] = {}
        self._joined = False
        """The peer has sent how many frames it received. Before that, only control frames may be sent."""
        self._flight = 0
        self._unacked_bytes = 0
        """Bytes of small messages that have not been acknowledged. Bulk data is limited by the window instead."""
        self._acked = 0
        self._asked = False
        """An acknowledgement has been requested."""
        self._pong_due = False
        self._pong = b""
        """The payload of the peer's last PING, to be echoed."""
        self._pings = 0
        self.echoed = 0
        """The number of the last PING that the peer has echoed: proof that it receives what this side sends."""
        self._ack_due = False
        self._owed_bytes = 0
        self._owed_frames = 0
        self.received = 0
        """Sequenced frames that have been received, over all connections."""
        self.last_received = clock()
        """When the last frame was received."""
        self.bytes_out = 0
        self.bytes_in = 0
        self.window = Window()

    # ---- connections

    def attach(self, hello: bytes) -> None:
        """Starts on a new connection: discards partial reads and writes, and queues HELLO."""
        self._reader = frames.Reader(self)
        self._batch.clear()
        self._control.clear()
        self._replay.clear()
        self._control.append(frame(HELLO, 0, hello))
        self._joined = self._asked = self._pong_due = self._ack_due = False
        self.window.restart()
        self.last_received = self._clock()

    def resume(self, received: int) -> None:
        """The peer has received `received` frames: resends the later ones."""
        if received < self._acked:
            raise ProtocolError(
                f"the other side has forgotten frames that it had acknowledged: {received}, {self._acked}"
            )
        self._acknowledge(received)
        self._replay = deque(self._unacked)
        self._joined = True

    # ---- sending

    def send(
        self, stream: int, head: bytes, parts: Sequence[Buffer] = (), *, urgent: bool = False, large: bool = False
    ) -> None:
        """Queues a message. With `urgent`, its data stays in order with small messages, whatever its size.

        With `large`, only the head is queued, and `send_data` adds the data.
        """
        if sum(map(len, parts)) <= SMALL and len(head) <= SMALL and not large:
            self._urgent.append(frames.head_frame(stream, head, parts))
            return
        if len(head) > frames.LIMIT:
            raise ProtocolError(f"a message whose head has {len(head)} bytes")
        self._urgent.append(frames.head_frame(stream, head))
        for part in parts:
            if urgent:
                view = memoryview(part)
                for at in range(0, len(view), frames.CHUNK):
                    self._urgent.append(frame(DATA, stream, bytes(view[at : at + frames.CHUNK])))
            else:
                self.send_data(stream, part)

    def send_now(self, stream: int, head: bytes, parts: Sequence[Buffer], send: Send) -> bool:
        """Queues a message and flushes. A small one is written directly if nothing else is queued."""
        if sum(map(len, parts)) > SMALL or len(head) > SMALL:
            self.send(stream, head, parts)
            return self.flush(send)
        whole = frames.head_frame(stream, head, parts)
        if self.relay(whole, send):
            return not self._batch
        self._urgent.append(whole)
        return self.flush(send)

    def relay(self, whole: bytes, send: Send) -> bool:
        """Writes the frame of a small message directly; queues what `send` does not accept.

        Returns False, and does nothing, if anything else is queued before it.
        """
        if self._batch or self._urgent or self._send_queue.turns or self._control or self._replay:
            return False
        if self._ack_due or self._pong_due or not self._joined:
            return False
        self._unacked.append(whole)
        self._unacked_bytes += len(whole)
        try:
            sent = send((whole,))
        except BlockingIOError:
            sent = 0
        self.bytes_out += sent
        if sent < len(whole):
            self._batch.append(memoryview(whole)[sent:])
        return True

    def send_data(self, stream: int, data: Buffer) -> None:
        """Queues more data of a message that `send` has begun."""
        self._send_queue.add(stream, data)

    def queued(self, stream: int) -> int:
        """Bytes of bulk data of this stream that are queued."""
        return self._send_queue.queued(stream)

    def forget(self, stream: int) -> None:
        """Ends this stream and drops its queued data."""
        self._send_queue.streams.pop(stream, None)
        self._used.pop(stream, None)

    def finish(self, stream: int) -> None:
        """Ends this stream once its queued data is sent."""
        self._send_queue.finish(stream)
        self._used.pop(stream, None)

    def end(self, stream: int) -> None:
        """The same as `finish`, and tells the peer: an empty DATA frame follows the last."""
        self._send_queue.mark_end(stream)
        self.finish(stream)

    def ping(self) -> int:
        """Sends a PING and returns its number. `echoed` is at least this number once the peer has replied."""
        self._pings += 1
        self._control.append(frame(PING, 0, COUNT.pack(self._pings)))
        return self._pings

    def bye(self, reason: str = "") -> None:
        self._control.append(frame(BYE, 0, reason.encode()))

    def used(self, stream: int, length: int) -> None:
        """This side has consumed `length` bytes of this stream: the peer may send as many more."""
        owed = self._used.get(stream, 0) + length
        if owed >= CREDIT_WINDOW // 4:
            self._urgent.append(frame(CREDIT, stream, COUNT.pack(owed)))
            owed = 0
        self._used[stream] = owed

    def flush(self, send: Send) -> bool:
        """Writes until everything is sent (True) or `send` accepts no more (False)."""
        batch = self._batch
        while batch or self._fill():
            try:
                sent = send(list(batch) if len(batch) < _PIECES else list(itertools.islice(batch, _PIECES)))
            except BlockingIOError:
                return False
            self.bytes_out += sent
            while sent:
                first = batch[0]
                if sent < len(first):
                    batch[0] = memoryview(first)[sent:]
                    break
                sent -= len(first)
                batch.popleft()
        return True

    @property
    def is_received(self) -> bool:
        """Whether the peer has acknowledged everything that was sent."""
        return not (self._urgent or self._send_queue.turns or self._replay or self._unacked)

    @property
    def has_output(self) -> bool:
        """Whether something could be written now."""
        if self._batch or self._control or self._pong_due or self._ack_due:
            return True
        if not self._joined:
            return False
        if self._replay or self._urgent:
            return True
        if not self._send_queue.turns:
            return False
        if self._flight >= self.window.size:
            return not self._asked
        return self._send_queue.is_ready

    def _fill(self) -> bool:
        batch = self._batch
        while self._control:
            batch.append(self._control.popleft())
        if not self._joined:
            return bool(batch)
        if self._pong_due:
            batch.append(frame(PONG, 0, self._pong))
        if self._ack_due:
            batch.append(frame(ACK, 0, COUNT.pack(self.received)))
        self._pong_due = self._ack_due = False
        now = self._clock() if self._send_queue.turns or self._replay else 0.0
        if self._replay:
            while self._replay and len(batch) < 64:
                sent = self._replay.popleft()
                if isinstance(sent, bytes):
                    batch.append(sent)
                else:
                    sent.at = now
                    batch.extend(filter(len, (sent.header, sent.chunk)))
            return True
        while self._urgent and len(batch) < 64:
            whole = self._urgent.popleft()
            self._unacked.append(whole)
            self._unacked_bytes += len(whole)
            batch.append(whole)
        if not batch and self._send_queue.turns:
            if self._flight < self.window.size:
                piece = self._send_queue.next(self.window.chunk)
                if piece is not None:
                    self._unacked.append(_Sent(*piece, now))
                    self._flight += len(piece[1])
                    batch.extend(filter(len, piece))  # an empty chunk is its header alone
            elif not self._asked:
                self._asked = True
                batch.append(frame(PING))
        return bool(batch)

    # ---- receiving

    def read(self, recv_into: frames.RecvInto) -> bool:
        """Reads once, calls the handler for complete frames, queues replies. Returns False at end of file."""
        alive = self._reader.pump(recv_into)
        if self._unacked_bytes > MOST_UNACKED:
            raise ProtocolError(f"the last {self._unacked_bytes} bytes that were sent are not acknowledged")
        if self._owed_bytes >= ACK_BYTES or self._owed_frames >= ACK_FRAMES:
            self._owed_bytes = self._owed_frames = 0
            self._ack_due = True
        return alive

    def place(self, stream: int, length: int) -> memoryview:
        return self._handler.place(stream, length)

    def arrived(self, kind: int, stream: int, payload: memoryview, head: int) -> None:
        self.last_received = self._clock()
        self.bytes_in += len(payload) + HEADER.size
        if kind >= HEAD:
            if not self._joined:
                raise ProtocolError("a message before hello")
            self.received += 1
            self._owed_frames += 1
        if kind == HEAD:
            if head:
                self._handler.opened(stream, bytes(payload[:head]), payload[head:])
            else:
                self._handler.opened(stream, bytes(payload), None)
        elif kind == DATA:
            self._owed_bytes += len(payload)
            self._handler.data(stream, payload)
        elif kind == CREDIT:
            self._send_queue.grant(stream, _count(payload))
        elif kind == ACK:
            self._acknowledge(_count(payload))
        elif kind == PING:
            self._pong_due = self._ack_due = True
            self._pong = bytes(payload[: COUNT.size])
        elif kind == PONG:
            if len(payload) == COUNT.size:
                self.echoed = _count(payload)
        elif kind == HELLO:
            if self._joined:
                raise ProtocolError("hello twice on one connection")
            self._handler.hello(bytes(payload))
        elif kind == BYE:
            self._handler.bye(bytes(payload[:4096]).decode(errors="replace"))

    def _acknowledge(self, count: int) -> None:
        if count > self._acked + len(self._unacked):
            raise ProtocolError(f"{count} frames acknowledged, {self._acked + len(self._unacked)} sent")
        newest: _Sent | None = None
        while self._acked < count:
            sent = self._unacked.popleft()
            self._acked += 1
            if isinstance(sent, bytes):
                self._unacked_bytes -= len(sent)
            else:
                self._flight -= len(sent.chunk)
                newest = sent
        if newest is not None:  # the acknowledgement of earlier chunks may have been delayed until this one
            self._asked = False
            now = self._clock()
            self.window.observe(now - newest.at, now)


def _count(payload: memoryview) -> int:
    if len(payload) != COUNT.size:
        raise ProtocolError(f"a count of {len(payload)} bytes")
    return int(COUNT.unpack(payload)[0])
