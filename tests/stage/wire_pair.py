"""Two muxes and a connection between them that delivers what, and when, a test says; it can be cut anywhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from skyfab.protocol.mux import Mux

Buffer = bytes | bytearray | memoryview


def content(seed: int, size: int) -> bytes:
    """Bytes that differ from place to place, so that a swap, a gap or a double shows."""
    return random.Random(seed).randbytes(size)


class Wire:
    """One direction of a connection. Never blocks; a cut loses all but a prefix of what is under way."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self.dead = False

    def __len__(self) -> int:
        return len(self._bytes)

    def sender(self, room: int) -> Callable[[Sequence[Buffer]], int]:
        """A `send` that takes so many bytes in all, then no more."""

        def send(buffers: Sequence[Buffer]) -> int:
            nonlocal room
            if not room:
                raise BlockingIOError
            data = b"".join(buffers)[:room]
            room -= len(data)
            if not self.dead:
                self._bytes += data
            return len(data)

        return send

    def receive(self, view: memoryview, most: int = 1 << 30) -> int:
        size = min(len(view), len(self._bytes), most)
        if not size and not self.dead:
            raise BlockingIOError
        view[:size] = self._bytes[:size]
        del self._bytes[:size]
        return size

    def cut(self, arrives: int) -> None:
        """From now on nothing enters; of what was under way only so many bytes still arrive."""
        del self._bytes[arrives:]
        self.dead = True


class Side:
    """A handler that writes down what it is told. A head says the size of its data: ``NUMBER:SIZE``."""

    def __init__(self, clock: Callable[[], float], *, uses: bool = True) -> None:
        self.mux = Mux(self, clock=clock)
        self.uses = uses
        """Give credit back as data arrives."""
        self.heads: list[tuple[int, bytes]] = []
        self.bodies: dict[int, bytearray] = {}
        self.sizes: dict[int, list[int]] = {}
        """Of the frames with data."""
        self.sent_heads: list[tuple[int, bytes]] = []
        self.sent_bodies: dict[int, bytes] = {}
        self.said_bye: list[str] = []
        self.hellos = 0
        self.source = self.sink = Wire()
        self._places: dict[int, bytearray] = {}

    # ---- sending, written down

    def say(self, stream: int, body: bytes = b"", *, urgent: bool = False, large: bool = False) -> None:
        head = f"{len(self.sent_heads)}:{len(body)}".encode()
        self.sent_heads.append((stream, head))
        self.sent_bodies[stream] = self.sent_bodies.get(stream, b"") + body
        middle = len(body) // 3
        self.mux.send(stream, head, (body[:middle], body[middle:]), urgent=urgent, large=large)

    def say_more(self, stream: int, body: bytes) -> None:
        self.sent_bodies[stream] = self.sent_bodies.get(stream, b"") + body
        self.mux.send_data(stream, body)

    # ---- connections

    def attach(self, source: Wire, sink: Wire) -> None:
        self.source, self.sink = source, sink
        self.mux.attach(str(self.mux.received).encode())

    def flush(self, room: int = 1 << 30) -> bool:
        return self.mux.flush(self.sink.sender(room))

    def read(self, most: int = 1 << 30) -> bool:
        """Once; False when there is nothing."""
        try:
            return self.mux.read(lambda view: self.source.receive(view, most))
        except BlockingIOError:
            return False

    # ---- what the mux tells

    def hello(self, payload: bytes) -> None:
        self.hellos += 1
        self.mux.resume(int(payload))

    def opened(self, stream: int, head: bytes, data: memoryview | None) -> None:
        self.heads.append((stream, head))
        body = self.bodies.setdefault(stream, bytearray())
        if data is not None:
            body += data

    def place(self, stream: int, length: int) -> memoryview:
        self._places[stream] = bytearray(length)
        return memoryview(self._places[stream])

    def data(self, stream: int, view: memoryview) -> None:
        assert view.obj is self._places[stream]
        self.sizes.setdefault(stream, []).append(len(view))
        self.bodies[stream] += view
        if self.uses:
            self.mux.used(stream, len(view))

    def bye(self, reason: str) -> None:
        self.said_bye.append(reason)


class Pair:
    """Two sides, connected."""

    def __init__(self, *, uses: bool = True) -> None:
        self.now = 0.0
        self.a = Side(lambda: self.now, uses=uses)
        self.b = Side(lambda: self.now, uses=uses)
        self._next: tuple[Wire, Wire] = (Wire(), Wire())
        self.attach(self.a)
        self.attach(self.b)

    def cut(self, arrives_at_a: int = 0, arrives_at_b: int = 0) -> None:
        """The connection breaks. Neither side knows yet; each comes back by `attach`, when it likes."""
        self._next[0].cut(arrives_at_b)
        self._next[1].cut(arrives_at_a)
        self._next = (Wire(), Wire())

    def attach(self, side: Side) -> None:
        there, back = self._next
        if side is self.a:
            side.attach(source=back, sink=there)
        else:
            side.attach(source=there, sink=back)

    def on_newest(self, side: Side) -> bool:
        return side.sink in self._next

    def settle(self) -> None:
        """Everything is delivered that can be: returns when neither side has anything to write or to read."""
        moved = True
        while moved:
            moved = False
            for side in (self.a, self.b):
                before = side.mux.bytes_out
                assert side.flush()
                assert not side.mux.has_output, "flush() said that everything is out"
                moved |= side.mux.bytes_out > before
                while side.read():
                    moved = True
                self.now += 0.001

    def check(self) -> None:
        """Each side has heard what the other said: once, whole, and in order."""
        for speaker, hearer in ((self.a, self.b), (self.b, self.a)):
            assert hearer.heads == speaker.sent_heads
            assert set(hearer.bodies) == {stream for stream, _ in speaker.sent_heads}
            for stream, body in hearer.bodies.items():
                assert body == speaker.sent_bodies[stream], f"stream {stream}"
