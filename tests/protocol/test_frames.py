"""frames.Reader: however the bytes come, the same frames come out; bytes that are not frames are one typed error."""

from __future__ import annotations

import socket
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyfab.errors import ProtocolError
from skyfab.protocol.frames import (
    CREDIT,
    DATA,
    HEAD,
    HEADER,
    HELLO,
    KINDS,
    LIMIT,
    PING,
    Reader,
    Spare,
    data_header,
    frame,
    head_frame,
)

Frame = tuple[int, int, bytes, int]
"""Kind, stream, payload, and how many bytes of it are the head."""

quick = settings(deadline=None, max_examples=60)


class Collector:
    """Keeps every frame; data lands in memory of its own, as it does in real life."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.placed = 0

    def place(self, stream: int, length: int) -> memoryview:
        self.placed += length
        return memoryview(bytearray(length))

    def arrived(self, kind: int, stream: int, payload: memoryview, head: int) -> None:
        self.frames.append((kind, stream, bytes(payload), head))


class Trickle:
    """A `recv_into` that gives the wire in pieces of the given sizes, then all the rest, then the end."""

    def __init__(self, wire: bytes, sizes: list[int]) -> None:
        self._wire = memoryview(wire)
        self._sizes = iter(sizes)

    def __call__(self, view: memoryview) -> int:
        assert len(view), "an empty read would look like the end of the stream"
        size = min(next(self._sizes, len(self._wire)), len(view), len(self._wire))
        view[:size] = self._wire[:size]
        self._wire = self._wire[size:]
        return size


def read_all(wire: bytes, sizes: list[int], *, scratch: int = 64 * 1024) -> list[Frame]:
    collector = Collector()
    reader = Reader(collector, size=scratch)
    recv = Trickle(wire, sizes)
    while reader.pump(recv):
        pass
    return collector.frames


payloads = st.one_of(st.binary(max_size=40), st.integers(0, 700).map(lambda n: bytes(i % 251 for i in range(n))))


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    kind, payload = draw(st.sampled_from(sorted(KINDS))), draw(payloads)
    head = draw(st.integers(0, len(payload))) if kind == HEAD else 0
    return kind, draw(st.integers(0, 2**32 - 1)), payload, head


frames_of_any_kind = st.lists(frames(), max_size=12)
piece_sizes = st.lists(st.integers(1, 200), max_size=200)


@quick
@given(frames_of_any_kind, piece_sizes, st.sampled_from([32, 64, 300, 65536]))
def test_any_split_of_the_stream_gives_the_same_frames(sent: list[Frame], sizes: list[int], scratch: int) -> None:
    """The split, and the size of the scratch memory (payloads and control frames outgrow it), make no difference."""
    wire = b"".join(frame(*one) for one in sent)
    assert read_all(wire, sizes, scratch=scratch) == sent


def test_data_lands_in_the_memory_its_owner_names() -> None:
    """A payload larger than the scratch memory is received straight into its place, with no copy in between."""
    target = bytearray(1_000_000)
    reads: list[int] = []

    class Owner(Collector):
        def place(self, stream: int, length: int) -> memoryview:
            return memoryview(target)

    content = bytes(range(250)) * 4000
    wire = Trickle(frame(DATA, 1, content), [])

    def recv(view: memoryview) -> int:
        reads.append(len(view))
        return wire(view)

    owner = Owner()
    reader = Reader(owner)
    while reader.pump(recv):
        pass
    assert bytes(target) == content
    assert reads[1] == len(content) - (64 * 1024 - HEADER.size), "the second read asks for all the rest at once"


def test_a_stream_that_ends_inside_a_frame_hands_over_what_was_whole() -> None:
    """Cut after any byte: the frames before the cut arrive, the one under it does not."""
    sent = [(HEAD, 1, b"head", 4), (DATA, 1, b"x" * 100, 0), (PING, 0, b"", 0)]
    wire = b"".join(frame(*one) for one in sent)
    ends = [20, 136, 152]
    assert ends[-1] == len(wire)
    for cut in range(len(wire) + 1):
        for scratch in (32, 65_536):
            assert read_all(wire[:cut], [], scratch=scratch) == [
                one for one, end in zip(sent, ends, strict=True) if end <= cut
            ]


def test_blocking_is_passed_on_and_nothing_is_lost() -> None:
    """BlockingIOError in the middle of a frame leaves the reader ready to go on."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        collector = Collector()
        reader = Reader(collector, size=64)

        def drain() -> None:
            while True:
                reader.pump(ours.recv_into)

        wire = frame(HEAD, 1, b"h" * 100) + frame(DATA, 1, b"d" * 100) + frame(PING)
        for at in range(0, len(wire), 7):
            theirs.sendall(wire[at : at + 7])
            with pytest.raises(BlockingIOError):
                drain()
        assert collector.frames == [(HEAD, 1, b"h" * 100, 0), (DATA, 1, b"d" * 100, 0), (PING, 0, b"", 0)]


@pytest.mark.parametrize("kind", [kind for kind in (0, 6, 15, 19, 127, 255) if kind not in KINDS])
def test_an_unknown_kind_is_refused(kind: int) -> None:
    with pytest.raises(ProtocolError):
        read_all(HEADER.pack(kind, 0, 0, 0), [])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_head_longer_than_its_frame_is_refused(kind: int) -> None:
    with pytest.raises(ProtocolError):
        read_all(HEADER.pack(kind, 5, 1, 4) + b"abcd", [])


@pytest.mark.parametrize("length", [LIMIT + 1, 2**40, 2**64 - 1])
@pytest.mark.parametrize("kind", [DATA, HEAD, HELLO, CREDIT])
def test_an_oversized_length_is_refused_before_anything_is_allocated(kind: int, length: int) -> None:
    collector = Collector()
    reader = Reader(collector)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            reader.pump(Trickle(HEADER.pack(kind, 0, 1, length), []))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert collector.placed == 0
    assert peak < 100_000


def test_a_place_of_another_size_is_refused() -> None:
    """The owner has less room than was sent: the wire is out of step."""

    class Small(Collector):
        def place(self, stream: int, length: int) -> memoryview:
            return memoryview(bytearray(length - 1))

    with pytest.raises(ProtocolError):
        Reader(Small()).pump(Trickle(frame(DATA, 1, b"abc"), []))


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=400), piece_sizes)
def test_random_bytes_are_frames_or_one_typed_error(noise: bytes, sizes: list[int]) -> None:
    """Nothing but ProtocolError, whatever comes; and what was accepted fits into what was sent."""
    collector = Collector()
    reader = Reader(collector, size=64)
    recv = Trickle(noise, sizes)
    try:
        while reader.pump(recv):
            pass
    except ProtocolError:
        pass
    assert sum(HEADER.size + len(payload) for _, _, payload, _ in collector.frames) <= len(noise)


def test_frames_are_the_same_however_they_are_made() -> None:
    assert data_header(5, 3) + b"abc" == frame(DATA, 5, b"abc")
    assert head_frame(5, b"head", [b"ab", memoryview(b"c")]) == frame(HEAD, 5, b"headabc", 4)
    assert head_frame(5, b"head") == frame(HEAD, 5, b"head")


def test_memory_is_used_again_only_when_nothing_refers_to_it() -> None:
    spare, size = Spare(), 1 << 18
    first, second = spare.take(size), spare.take(size)
    assert first.obj is not second.obj
    area, part = id(first.obj), first[5:]
    del first
    assert id(spare.take(size).obj) != area, "a part of it is in use"
    del part
    again = spare.take(size - 1)
    assert (id(again.obj), len(again)) == (area, size - 1)
    assert len(spare.take(size + 1)) == size + 1


def test_little_memory_is_kept() -> None:
    spare = Spare()
    tracemalloc.start()
    try:
        views = [spare.take(1 << 18) for _ in range(40)]
        del views
        assert tracemalloc.get_traced_memory()[0] < 8 << 18
    finally:
        tracemalloc.stop()
