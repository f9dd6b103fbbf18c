"""streams.Mux on one connection: everything arrives, small before large, and neither side is flooded."""

from __future__ import annotations

import os
import socket
from collections import deque

import pytest
from stage.wire_pair import Pair, Wire, content

from skyfab.errors import ProtocolError
from skyfab.protocol import frames
from skyfab.protocol.frames import ACK, COUNT, CREDIT, DATA, HEAD, HELLO, PING, frame
from skyfab.protocol.mux import ACK_BYTES, ACK_FRAMES, SMALL, Window
from skyfab.protocol.send_queue import CREDIT_WINDOW

MB = 1024 * 1024


def test_a_head_larger_than_a_small_message_travels_too() -> None:
    """A list of many thousand blob names is one head."""
    pair = Pair()
    head = b"h" * (SMALL + 1)
    pair.a.mux.send(1, head, (b"data",))
    pair.settle()
    assert pair.b.heads == [(1, head)]
    assert pair.b.bodies[1] == b"data"


def test_the_end_of_a_stream_follows_its_data() -> None:
    """Also over a connection that replaces another one."""
    pair = Pair()
    pair.settle()
    pair.a.say(7, large=True)
    pair.a.say_more(7, content(1, 300_000))
    pair.a.mux.end(7)
    pair.a.flush()
    pair.cut()
    for side in (pair.a, pair.b):
        pair.attach(side)
    pair.settle()
    pair.check()
    sizes = pair.b.sizes[7]
    assert sum(sizes) == 300_000 and sizes[-1] == 0 and 0 not in sizes[:-1]


def test_a_small_message_overtakes_bulk() -> None:
    """A cancel behind 16 MiB waits for what the wire has taken already, and for no more."""
    pair = Pair()
    pair.settle()
    pair.a.say(1, content(1, 16 * MB))
    pair.a.flush(100_000)
    on_the_wire = len(pair.a.sink)
    pair.a.say(3, b"cancel")
    while not any(stream == 3 for stream, _ in pair.b.heads):
        pair.a.flush(10_000)
        pair.b.read()
    assert len(pair.b.bodies[1]) <= on_the_wire + 4 * frames.CHUNK
    pair.settle()
    pair.check()


def test_a_heartbeat_overtakes_everything() -> None:
    """PING goes out before messages that were queued earlier."""
    pair = Pair()
    pair.settle()
    pair.a.say(1, content(1, MB))
    for stream in range(3, 100, 2):
        pair.a.say(stream, b"message")
    pair.a.mux.ping()
    out: list[bytes] = []

    def send(buffers: list[bytes]) -> int:
        out.append(b"".join(buffers))
        return len(out[-1])

    pair.a.mux.flush(send)
    assert out[0][0] == PING
    assert len(out[0]) < pair.a.mux.window.chunk, "bulk data is not in the write of small messages"


def test_data_is_sent_as_views_of_the_callers_memory() -> None:
    """A large buffer is never copied on its way to `send`."""
    pair = Pair()
    pair.settle()
    memory = bytearray(content(1, 2 * MB))
    pair.a.mux.send(1, b"head", (memory,))
    seen: set[int] = set()

    def send(buffers: list[bytes | memoryview]) -> int:
        seen.update(id(b.obj) for b in buffers if isinstance(b, memoryview))
        return sum(map(len, buffers))

    pair.a.mux.flush(send)
    assert seen == {id(memory)}


# ---- credits and windows


def test_a_receiver_that_uses_nothing_is_sent_one_window_of_credit_and_no_more() -> None:
    """Other streams continue meanwhile, and the stalled one continues once its data is used."""
    pair = Pair(uses=False)
    pair.a.say(1, content(1, CREDIT_WINDOW + 2 * MB))
    pair.settle()
    assert len(pair.b.bodies[1]) == CREDIT_WINDOW
    pair.a.say(3, content(3, 3 * MB))
    pair.settle()
    assert pair.b.bodies[3] == pair.a.sent_bodies[3]
    assert len(pair.b.bodies[1]) == CREDIT_WINDOW
    pair.b.mux.used(1, CREDIT_WINDOW)
    pair.settle()
    pair.check()


def test_messages_that_fit_one_frame_need_no_credit() -> None:
    pair = Pair(uses=False)
    for number in range(300):
        pair.a.say(1, content(number, SMALL))
    pair.settle()
    pair.check()


def test_unheard_data_is_bounded_by_the_window() -> None:
    """Into a connection that swallows everything and answers nothing goes one window, not the whole gigabyte."""
    pair = Pair()
    pair.settle()
    for stream in range(1, 41, 2):
        pair.a.mux.send(stream, b"head", [memoryview(bytearray(CREDIT_WINDOW))] * 3)
    pair.a.sink.cut(0)
    before = pair.a.mux.bytes_out
    assert pair.a.flush()
    assert pair.a.mux.bytes_out - before <= pair.a.mux.window.size + 4 * frames.CHUNK + 40 * 64
    assert not pair.a.mux.has_output


def test_forget_drops_what_waits_and_leaves_the_others_alone() -> None:
    pair = Pair()
    pair.settle()
    pair.a.say(1, content(1, 8 * MB))
    pair.a.say(3, content(3, MB))
    pair.a.flush(100_000)
    pair.a.mux.forget(1)
    assert pair.a.mux.queued(1) == 0
    pair.a.mux.send(1, b"ended")
    pair.settle()
    assert pair.b.heads[-1] == (1, b"ended")
    assert len(pair.b.bodies[1]) < MB
    assert pair.b.bodies[3] == pair.a.sent_bodies[3]


# ---- the window follows the link


class Link:
    """A link of `rate` bytes a second, `base` seconds there and back, and a queue as deep as it gets."""

    def __init__(self, window: Window, *, rate: float, base: float) -> None:
        self.window, self.rate, self.base = window, rate, base
        self.now = self._free = 0.0
        self._under_way: deque[tuple[float, float, int]] = deque()
        self._flight = 0

    def run(self, seconds: float) -> None:
        """Sends as much as the window allows, and lets it see the acknowledgements."""
        end = self.now + seconds
        while self.now < end:
            while self._flight < self.window.size:
                size = self.window.chunk
                self._free = max(self._free, self.now) + size / self.rate
                self._under_way.append((self.now, self._free + self.base, size))
                self._flight += size
            sent, self.now, size = self._under_way.popleft()
            self._flight -= size
            self.window.observe(self.now - sent, self.now)

    @property
    def delay(self) -> float:
        """How long a cancel waits behind what is under way."""
        return max(0.0, self._free - self.now)


@pytest.mark.parametrize("rate", [1e6, 100e6])
def test_the_window_fills_a_link_without_filling_its_queues(rate: float) -> None:
    """It carries the link's rate, and what a cancel waits behind stays around a third of a second."""
    link = Link(Window(), rate=rate, base=0.02)
    link.run(20)
    assert link.window.size >= rate * 0.02
    assert link.delay < 0.4


def test_a_new_connection_may_have_a_longer_way() -> None:
    """From the office network to a phone: the old round trip says nothing about the new one."""
    pair = Pair()
    Link(pair.a.mux.window, rate=1e8, base=0.001).run(1)
    pair.cut()
    pair.attach(pair.a)
    Link(pair.a.mux.window, rate=1e8, base=0.3).run(30)
    assert pair.a.mux.window.size > 4 * MB, "a link of 100 MB/s and 300 ms is held to 64 KiB a round trip"


# ---- what the other side may not do


def feed(pair: Pair, data: bytes) -> None:
    """The other side of `a` writes this."""
    wire = Wire()
    wire.sender(len(data))([data])
    pair.a.source = wire
    while pair.a.read():
        pass


@pytest.mark.parametrize(
    "said",
    [
        frame(ACK, 0, COUNT.pack(2)),
        frame(HELLO, 0, b"0"),
        *(frame(kind, 1, bytes(size)) for kind in (ACK, CREDIT) for size in (0, 7, 9)),
    ],
)
def test_what_the_other_side_cannot_have_to_say_is_refused(said: bytes) -> None:
    """Frames acknowledged that were never sent, a second hello, a count of the wrong size."""
    pair = Pair()
    pair.a.say(1, b"one")
    pair.settle()
    with pytest.raises(ProtocolError):
        feed(pair, said)


def test_a_hello_that_has_heard_frames_never_sent_is_refused() -> None:
    with pytest.raises(ProtocolError):
        Pair().a.mux.resume(1)


def test_a_hello_that_has_forgotten_what_it_acknowledged_is_refused() -> None:
    """A side that starts anew under the old name: what it forgot is lost, so nothing may follow."""
    pair = Pair()
    for _ in range(5):
        pair.a.say(1, b"one")
    pair.settle()
    pair.b.mux.ping()
    pair.a.mux.ping()
    pair.settle()
    pair.cut()
    pair.attach(pair.a)
    with pytest.raises(ProtocolError):
        pair.a.mux.resume(2)


def test_an_old_acknowledgement_changes_nothing() -> None:
    pair = Pair()
    for _ in range(3):
        pair.a.say(1, b"one")
    pair.settle()
    feed(pair, frame(ACK, 0, COUNT.pack(3)) + frame(ACK, 0, COUNT.pack(1)))
    assert not pair.a.mux._unacked


def test_messages_before_hello_are_refused() -> None:
    """HELLO says which version is spoken and where the counting starts: nothing may come before it."""
    pair = Pair()
    with pytest.raises(ProtocolError):
        feed(pair, frame(HEAD, 1, b"0:0", 3))
    assert pair.a.heads == []


def test_no_write_has_more_pieces_than_the_system_takes() -> None:
    """writev refuses more than IOV_MAX (1,024) buffers; a burst of answers must not run into that."""
    pair = Pair()
    pair.settle()
    feed(pair, frame(PING) * 4000)
    for number in range(3000):
        pair.a.mux.ping()
        pair.a.mux.send(1, b"x")
        pair.a.mux.used(number, CREDIT_WINDOW)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in (ours, theirs):
            end.setblocking(False)
        done = False
        while not done:
            done = pair.a.mux.flush(lambda buffers: os.writev(ours.fileno(), buffers))
            try:
                while theirs.recv(1 << 20):
                    pass
            except BlockingIOError:
                pass


def test_bye_arrives_with_its_reason_bounded_and_printable() -> None:
    pair = Pair()
    pair.settle()
    pair.b.mux.bye("done")
    pair.settle()
    assert pair.a.said_bye == ["done"]
    feed(pair, frame(frames.BYE, 0, b"\xff" * 100_000))
    assert len(pair.a.said_bye[-1]) <= 4096


def test_heard_moves_with_every_frame() -> None:
    """The owner tells a silent connection from a quiet one by it."""
    pair = Pair()
    pair.settle()
    pair.now = 50.0
    pair.b.mux.ping()
    pair.settle()
    assert pair.a.mux.last_received >= 50.0
    assert pair.b.mux.last_received >= 50.0


# ---- small messages


def small(stream: int, body: bytes = b"data") -> bytes:
    return frame(HEAD, stream, b"0:%d" % len(body) + body, len(b"0:%d" % len(body)))


def test_a_relayed_frame_leaves_as_it_is_in_one_write() -> None:
    pair = Pair()
    pair.settle()
    writes: list[bytes] = []
    before = pair.a.mux.bytes_out
    assert pair.a.mux.relay(small(1), lambda buffers: writes.append(b"".join(buffers)) or len(writes[-1]))
    assert writes == [small(1)]
    assert pair.a.mux.bytes_out == before + len(small(1))
    assert not pair.a.mux.has_output


@pytest.mark.parametrize("room", [0, 1, 15, 16, 20])
def test_what_of_a_relayed_frame_finds_no_room_follows(room: int) -> None:
    pair = Pair()
    pair.settle()
    assert pair.a.mux.relay(small(1), pair.a.sink.sender(room))
    assert pair.a.mux.has_output
    assert not pair.a.mux.relay(small(3), pair.a.sink.sender(1 << 20)), "it would be inside the other one"
    assert pair.a.mux.send_now(3, b"0:4", (b"data",), pair.a.sink.sender(1 << 20))
    pair.settle()
    assert pair.b.heads == [(1, b"0:4"), (3, b"0:4")]


def test_send_now_says_whether_everything_is_out() -> None:
    pair = Pair()
    pair.settle()
    assert pair.a.mux.send_now(1, b"head", (), pair.a.sink.sender(1 << 20))
    assert not pair.a.mux.send_now(3, b"head", (), pair.a.sink.sender(5))
    assert not pair.a.mux.send_now(5, b"head", (), pair.a.sink.sender(5))
    pair.settle()
    assert [stream for stream, _ in pair.b.heads] == [1, 3, 5]


@pytest.mark.parametrize("what", ["small", "large", "ping", "pong", "hello"])
def test_nothing_is_relayed_past_what_waits(what: str) -> None:
    pair = Pair()
    if what != "hello":
        pair.settle()
    if what == "small":
        pair.a.say(7, b"before")
    elif what == "large":
        pair.a.say(7, content(1, 3 * SMALL))
    elif what == "ping":
        pair.a.mux.ping()
    elif what == "pong":
        pair.b.mux.ping()
        pair.b.flush()
        pair.a.read()
    out = pair.a.mux.bytes_out
    assert not pair.a.mux.relay(small(1), pair.a.sink.sender(1 << 20))
    assert pair.a.mux.bytes_out == out, "what is refused is not begun"
    assert not any(isinstance(kept, bytes) and kept == small(1) for kept in pair.a.mux._unacked)


def test_a_relayed_frame_is_sent_again_after_a_cut() -> None:
    """It is kept like any other, also where the connection broke while it was being written."""
    pair = Pair()
    pair.settle()
    assert pair.a.mux.relay(small(1), pair.a.sink.sender(10))

    def broken(buffers: object) -> int:
        raise ConnectionResetError

    pair.settle()
    with pytest.raises(ConnectionResetError):
        pair.a.mux.relay(small(3), broken)
    pair.cut()
    for side in (pair.a, pair.b):
        pair.attach(side)
    pair.settle()
    assert [stream for stream, _ in pair.b.heads] == [1, 3]


@pytest.mark.parametrize(
    ("received", "due"),
    [
        (frame(DATA, 1, bytes(ACK_BYTES - 1)), False),
        (frame(DATA, 1, bytes(ACK_BYTES // 2)) * 2, True),
        (small(3) * (ACK_FRAMES - 2), False),
        (small(3) * (ACK_FRAMES - 1), True),
    ],
    ids=["bytes", "more bytes", "frames", "more frames"],
)
def test_what_was_received_is_acknowledged_without_a_request(received: bytes, due: bool) -> None:
    pair = Pair(uses=False)
    pair.settle()
    feed(pair, small(1) + received)
    assert pair.a.mux.has_output is due


def test_neither_side_keeps_thousands_of_small_messages() -> None:
    """What is kept stays within what is acknowledged at a time."""
    pair = Pair()
    pair.settle()
    a, b = pair.a, pair.b
    for number in range(2000):
        for side, other in ((a, b), (b, a)):
            assert side.mux.send_now(1 + 2 * number, b"head", (), side.sink.sender(1 << 20))
            while other.read():
                pass
        a.flush()
        assert len(a.mux._unacked) <= 2 * ACK_FRAMES
        assert len(b.mux._unacked) <= 2 * ACK_FRAMES
    assert len(a.heads) == len(b.heads) == 2000


@pytest.mark.parametrize(
    ("head", "body", "writes"), [(10, SMALL, 1), (SMALL, 10, 1), (SMALL + 1, 10, 2), (10, SMALL + 1, 2)]
)
def test_send_now_writes_a_small_message_as_one_frame_and_no_larger_one(head: int, body: int, writes: int) -> None:
    pair = Pair()
    pair.settle()
    sent: list[bytes] = []
    assert pair.a.mux.send_now(
        1, b"h" * head, (bytes(body),), lambda buffers: sent.append(b"".join(buffers)) or len(sent[-1])
    )
    wire = b"".join(sent)
    kind, inline, stream, length = frames.HEADER.unpack_from(wire)
    assert (kind, stream) == (HEAD, 1)
    assert (inline, length) == ((head, head + body) if writes == 1 else (0, head))
    assert len(wire) >= head + body + frames.HEADER.size


def test_chunks_that_are_sent_again_are_timed_from_then() -> None:
    """Else the time without a connection would count as the time that data takes."""
    pair = Pair()
    pair.settle()
    pair.a.say(1, content(1, 2 * SMALL))
    pair.a.flush()
    pair.cut()
    pair.now += 30
    pair.attach(pair.a)
    pair.attach(pair.b)
    pair.settle()
    pair.a.mux.ping()
    pair.settle()
    pair.check()
    assert pair.a.mux.window._base < 1
