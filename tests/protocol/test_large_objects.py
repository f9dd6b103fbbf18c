"""Large bytes, bytearrays, memoryviews and texts: outside the pickle, and received into the object's own memory."""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from skyfab.errors import ProtocolError
from skyfab.protocol import blobs, codec
from skyfab.protocol.blobs import LARGE, Assembly, name_of, split

SIZE = LARGE + 12345


class Labeled(bytes):
    pass


def received(payload: codec.Payload) -> list[memoryview]:
    """The parts of a payload as the other side receives them: in pieces."""
    assembly = Assembly(json.loads(json.dumps(payload.parts)))
    for part in (payload.data, *payload.buffers):
        rest = memoryview(part)
        while rest:
            place = assembly.place(min(len(rest), 100_000))
            place[:] = rest[: len(place)]
            assembly.advance(len(place))
            rest = rest[len(place) :]
    return assembly.buffers()


def there(value: Any) -> Any:
    data, *buffers = received(codec.dumps(value))
    return codec.loads(data, buffers)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (os.urandom(SIZE), bytes),
        (bytearray(os.urandom(SIZE)), bytearray),
        (memoryview(os.urandom(SIZE)), bytes),
        (memoryview(os.urandom(2 * SIZE))[::2], bytes),
        ("x" * SIZE, str),
        ("ä\ud800€" * SIZE, str),
        (Labeled(os.urandom(SIZE)), Labeled),
        (os.urandom(LARGE), bytes),
        (os.urandom(LARGE - 1), bytes),
    ],
    ids=["bytes", "bytearray", "memoryview", "strided", "ascii", "surrogates", "subclass", "limit", "below"],
)
def test_types_and_content_arrive_exactly(value: Any, kind: type) -> None:
    found = there([value, {"again": value, 1: "small"}])
    assert type(found[0]) is kind
    assert found[0] == value
    assert found[1] == {"again": value, 1: "small"}
    if type(value) is kind and kind is not Labeled:
        assert found[1]["again"] is found[0]  # one object is sent once


def test_bytes_are_received_into_their_own_memory() -> None:
    data, memory = received(codec.dumps([os.urandom(SIZE)]))
    (found,) = codec.loads(data, [memory])
    area: Any = memory.obj
    assert found is area.owner


@pytest.mark.parametrize("opcode", [pickle.BINBYTES8, pickle.BYTEARRAY8, pickle.BINUNICODE8])
def test_objects_of_4_gib_leave_the_pickle_too(opcode: bytes) -> None:
    class Large(bytes):
        def __len__(self) -> int:
            return 1 << 32

    file = codec._Beside()
    file.write(opcode + (1 << 32).to_bytes(8, "little"))
    file.write(Large())
    payload = file.payload()
    assert len(payload.buffers) == 1
    assert payload.data.endswith(pickle.NEXT_BUFFER + pickle.TUPLE1 + pickle.REDUCE)


def test_bytes_are_sent_from_their_own_memory_and_others_as_they_were() -> None:
    value, changing = os.urandom(SIZE), bytearray(SIZE)
    payload = codec.dumps((value, changing))
    assert payload.buffers[0].obj is value
    assert len(payload.data) < 500
    changing.extend(b"more")  # a view would forbid that
    changing[0] = 1
    assert payload.buffers[1] == bytes(SIZE)


def test_a_mutable_object_belongs_to_one_call() -> None:
    data, *buffers = received(codec.dumps(bytearray(SIZE)))
    mapped = [blobs.allocate(len(buffer)) for buffer in buffers]  # as from the store
    first, second = codec.loads(data, mapped), codec.loads(data, mapped)
    first[0] = 1
    assert second[0] == 0
    assert not mapped[0][0]


def test_text_that_looks_like_an_opcode_stays_in_the_pickle() -> None:
    value = [b"B" + SIZE.to_bytes(4, "little"), *range(100_000), "X" * 70_000]
    assert there(value) == value


def test_several_values_of_one_pickle_keep_their_order() -> None:
    values: list[Any] = [b"a" * SIZE, "b" * SIZE, bytearray(b"c" * SIZE), b"d"]
    payload = codec.dumps(values[0], then=values[1:])
    data, *buffers = received(payload)
    load = codec.loader(data, buffers)
    assert [load() for _ in values] == values


def test_more_objects_than_parts_go_into_the_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "BESIDE", 2)
    values = [os.urandom(LARGE) for _ in range(4)]
    payload = codec.dumps(values)
    assert len(payload.buffers) == 2
    assert codec.loads(payload.data, payload.buffers) == values


def test_bytes_that_somebody_keeps_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    content = os.urandom(SIZE)
    arguments = (content, None)
    name = name_of(codec.dumps(arguments).buffers[0])
    assert name == name_of(bytearray(content))
    part = name_of(memoryview(content)[1:])
    import hashlib

    monkeypatch.setattr(hashlib, "sha256", lambda: hashed.append(1))
    assert name_of(codec.dumps([content]).buffers[0]) == name != part
    assert not hashed


def test_bytes_that_nobody_keeps_are_not_kept_for_their_name() -> None:
    gc.collect()
    blobs.forget_unused()
    name_of(codec.dumps(arguments := (os.urandom(SIZE),)).buffers[0])
    assert not blobs._known
    content = arguments[0]
    name_of(codec.dumps(arguments).buffers[0])
    assert blobs._known
    del content, arguments
    codec.dumps([object])
    assert not blobs._known


def test_equal_bytes_have_equal_names_and_others_do_not() -> None:
    first, second = bytes(SIZE), bytes(SIZE - 1) + b"1"
    assert name_of(memoryview(first)) != name_of(memoryview(second))
    assert name_of(memoryview(first)[1:]) == name_of(bytes(SIZE - 1))


def test_a_small_part_may_be_marked_too() -> None:
    assert split([["bytes", 3], 1], memoryview(b"abcd")) == [b"abc", b"d"]


def test_an_object_larger_than_memory_is_a_clear_error() -> None:
    assembly = Assembly([["bytes", 2**60]])
    with pytest.raises(ProtocolError, match="not enough memory for a part of 1152921504606846976 bytes"):
        assembly.place(10)


def test_several_threads_forget_names(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {number: (bytes([number % 256]) * 64 + str(number).encode(), "name") for number in range(20_000)}
    monkeypatch.setattr(blobs, "_known", kept)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(blobs.forget_unused) for _ in range(4)]:
                done.result()
    finally:
        sys.setswitchinterval(interval)
    assert not kept
