"""blobs: names, memory, and the parts of a message put together again."""

from __future__ import annotations

import resource

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyfab.errors import ProtocolError
from skyfab.protocol.blobs import LARGE, Assembly, allocate, check_name, inline_size, name_of, split

NAME = name_of(b"blob")

sizes = st.one_of(st.integers(0, 40), st.integers(0, 5000), st.sampled_from([LARGE - 1, LARGE, LARGE + 1]))


# ---- names


@pytest.mark.parametrize(
    "name",
    [
        "",
        "abc",
        NAME[:-1],
        NAME + "0",
        NAME.upper(),
        NAME[:-1] + "\n",
        NAME + "\n",
        NAME[:-1] + "g",
        NAME[:-2] + "/a",
        "../" + NAME[3:],
        "/" * 64,
        "." * 64,
        "\0" * 64,
        "٣" * 64,  # digits, but not ours
        NAME.encode(),
        None,
        7,
        [NAME],
        list(NAME),
        tuple(NAME),
    ],
    ids=repr,
)
def test_anything_but_a_sha256_is_refused_as_a_name(name: object) -> None:
    """Names become file names."""
    with pytest.raises(ProtocolError):
        check_name(name)


# ---- memory


@pytest.mark.parametrize("size", [0, 1, 31, 4096, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE + 5])
def test_allocated_memory_is_writable_zeroed_and_of_that_size(size: int) -> None:
    memory = allocate(size)
    assert len(memory) == memory.nbytes == size
    assert not memory.readonly
    assert not any(memory[:100])
    memory[:] = b"x" * size
    assert bytes(memory) == b"x" * size


@pytest.mark.parametrize("size", [1, 24, 1000, 100_000, LARGE, 5 * LARGE + 3])
def test_allocated_memory_begins_where_arrays_want_it(size: int) -> None:
    """16 bytes for any scalar; a page where the memory is mapped."""
    np = pytest.importorskip("numpy")
    for _ in range(20):
        address = np.frombuffer(allocate(size), dtype=np.uint8).ctypes.data
        assert address % (16 if size < LARGE else 4096) == 0


def test_large_memory_costs_nothing_until_it_is_filled() -> None:
    """Only what arrives is ever touched: a host that announces 16 GiB has cost us none of it."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = allocate(16 << 30)
    memory[:4096] = bytes(4096)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


# ---- parts


def test_inline_size_counts_what_follows_and_not_blobs() -> None:
    assert inline_size([]) == 0
    assert inline_size([3, [NAME, 1 << 40], 0, 4]) == 7


@pytest.mark.parametrize(
    "part",
    [
        *(-1, 1.5, True, None, "3", [], [NAME], [NAME, 1, 2], ["x", 1], [1, NAME], {}, [[NAME], 1]),
        *(["bytes", -1], ["bytes", True], ["bytes", "9"], ["list", 9], ["bytes", 1, "bytes"], [NAME, 1, "list"]),
    ],
    ids=repr,
)
def test_nonsense_for_a_part_is_refused(part: object) -> None:
    with pytest.raises(ProtocolError):
        inline_size([1, part])
    with pytest.raises(ProtocolError):
        Assembly([1, part])
    with pytest.raises(ProtocolError):
        split([1, part], memoryview(b"x"))


@pytest.mark.parametrize("stack", [0, 50, 100])
def test_a_deeply_nested_part_is_refused_on_any_stack(stack: int) -> None:
    """The parser managed it; saying what is wrong with it must not be what fails."""

    def deeper(levels: int, part: object) -> None:
        if levels:
            deeper(levels - 1, part)
        else:
            inline_size([part])

    for depth in range(700, 1000, 21):
        nested: list[object] = []
        for _ in range(depth):
            nested = [nested]
        with pytest.raises(ProtocolError):
            deeper(stack, nested)


def fill(assembly: Assembly, parts: list[bytes], cuts: list[int]) -> bool:
    """Delivers the parts in pieces that never span two, as a Mux does."""
    done = assembly.missing == 0
    chosen = iter(cuts)
    for part in parts:
        rest = memoryview(part)
        while rest:
            piece = rest[: next(chosen, len(rest))]
            place = assembly.place(len(piece))
            assert len(place) == len(piece)
            place[:] = piece
            done = assembly.advance(len(piece))
            rest = rest[len(piece) :]
    return done


@settings(deadline=None, max_examples=60)
@given(st.lists(sizes, max_size=6), st.lists(st.integers(1, 3000), max_size=30))
def test_an_assembly_gives_back_the_parts_whatever_the_pieces(lengths: list[int], cuts: list[int]) -> None:
    """Small, large, empty and mixed parts; each in memory of its own, which can be written to."""
    parts = [bytes([number + 1]) * length for number, length in enumerate(lengths)]
    assembly = Assembly(lengths)
    assert assembly.missing == sum(lengths)
    assert fill(assembly, parts, cuts) == (assembly.missing == 0)
    assert assembly.missing == 0
    buffers = assembly.buffers()
    assert [bytes(b) for b in buffers] == parts
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 500), max_size=8))
def test_split_gives_each_part_memory_of_its_own(lengths: list[int]) -> None:
    """The data of a small message is valid during one call only: its parts are copies, aligned and writable."""
    parts = [bytes([number + 1]) * length for number, length in enumerate(lengths)]
    data = bytearray(b"".join(parts))
    found = split(lengths, memoryview(data))
    data[:] = bytes(len(data))
    assert [bytes(view) for view in found] == parts
    for view in found:
        view[:] = bytes(len(view))


def test_blobs_stand_at_their_place_among_the_parts() -> None:
    asked: list[str] = []

    def resolve(name: str) -> memoryview:
        asked.append(name)
        return memoryview(b"from the store")

    parts = [2, [NAME, 14], 3]
    assembly = Assembly(parts, resolve=resolve)
    assert assembly.missing == 5
    fill(assembly, [b"ab", b"cde"], [])
    whole = Assembly([*parts, 0, 1], resolve=resolve)
    whole.fill(memoryview(b"abcdef"))
    assert [bytes(view) for view in assembly.buffers()] == [b"ab", b"from the store", b"cde"]
    assert [bytes(view) for view in whole.buffers()] == [b"ab", b"from the store", b"cde", b"", b"f"]
    assert asked == [NAME, NAME]
    for wrong in (b"abcde", b"abcdefg"):
        with pytest.raises(ProtocolError, match="announced"):
            Assembly([*parts, 0, 1], resolve=resolve).fill(memoryview(wrong))


def test_a_blob_where_there_is_no_store_is_refused() -> None:
    """A host's answer cannot make this machine open files."""
    with pytest.raises(ProtocolError):
        Assembly([[NAME, 3]]).buffers()
    with pytest.raises(ProtocolError):
        split([[NAME, 3]], memoryview(b""))


@pytest.mark.parametrize("sent", [0, 4, 6, 100])
def test_a_small_message_with_more_or_less_data_than_announced_is_refused(sent: int) -> None:
    with pytest.raises(ProtocolError):
        split([2, 3], memoryview(bytes(sent)))


def test_more_data_than_announced_is_refused() -> None:
    assembly = Assembly([LARGE])
    assembly.advance(LARGE - 10)
    with pytest.raises(ProtocolError):
        assembly.place(11)
    assert len(assembly.place(10)) == 10


def test_a_message_above_the_limit_is_refused_before_memory_is_taken() -> None:
    with pytest.raises(ProtocolError):
        Assembly([1 << 50], limit=1 << 30)


@pytest.mark.parametrize("size", [1 << 50, 1 << 62, 1 << 63, 1 << 64, 10**30])
def test_an_impossible_size_is_protocol_error(size: int) -> None:
    """An answer of an exabyte is nonsense like any other: not OSError, OverflowError or MemoryError."""
    with pytest.raises(ProtocolError):
        Assembly([size]).place(1)


def test_endlessly_many_tiny_parts_are_refused() -> None:
    """Four megabytes of head must not become half a gigabyte of little objects: buffers beside a pickle are large."""
    with pytest.raises(ProtocolError):
        Assembly([1] * 200_000)
