"""Large bytes and texts as arguments and results of calls: exactly as they are, and not sent again if repeated."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyfab as sky
from skyfab.context import own_stores
from skyfab.protocol.blobs import LARGE

SIZE = 3 * LARGE + 7


@pytest.fixture(scope="module")
def compute() -> Iterator[sky.Compute]:
    with sky.Compute("local", image=sky.Image(python=sys.executable), ui="none") as compute:
        yield compute


@sky.function
def identity(value: Any) -> Any:
    return value


@sky.function
def about(value: Any) -> tuple[str, str]:
    content = value if isinstance(value, bytes | bytearray) else value.encode()
    return type(value).__name__, hashlib.sha256(content).hexdigest()


@sky.function
def spoil(value: bytearray) -> int:
    """Changes what it is given, in place."""
    value[0] += 1
    return value[0]


def sent(compute: sky.Compute) -> int:
    """Bytes that were sent to the host so far."""
    (node,) = compute.hosts
    return node.session.connection.moved[0]


@pytest.mark.parametrize("kind", [bytes, bytearray, str])
def test_it_arrives_and_returns_as_it_was(compute: sky.Compute, kind: Any) -> None:
    content = os.urandom(SIZE)
    value = content.hex() if kind is str else kind(content)
    digest = hashlib.sha256(value.encode() if kind is str else value).hexdigest()
    for _ in range(4):  # with the call, into the store, and twice from there
        assert about(value) >> compute == (kind.__name__, digest)
        found = identity({"value": [value]}) >> compute
        assert type(found["value"][0]) is kind
        assert found == {"value": [value]}


def test_repeated_bytes_are_neither_sent_nor_hashed_again(
    compute: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = os.urandom(SIZE)
    expected = ("bytes", hashlib.sha256(content).hexdigest())
    for _ in range(2):
        assert about(content) >> compute == expected
    before = sent(compute)
    monkeypatch.setattr(hashlib, "sha256", None)
    for _ in range(3):
        assert about(content) >> compute == expected
    assert sent(compute) - before < LARGE


def test_changes_in_place_are_private_to_a_call(compute: sky.Compute) -> None:
    value = bytearray(SIZE)
    assert [spoil(value) >> compute for _ in range(4)] == [1, 1, 1, 1]
    assert value == bytearray(SIZE)
    assert compute.map(spoil, [value, value, value]) == [1, 1, 1]


def test_another_object_at_the_same_address_has_its_own_content(compute: sky.Compute) -> None:
    for number in range(6):  # each is freed, and the next one may get its memory
        content = bytes([number]) * SIZE
        for _ in range(2):
            assert about(content) >> compute == ("bytes", hashlib.sha256(content).hexdigest())


@sky.function
def stored() -> list[str]:
    """The files of the host's store of this pool."""
    with os.scandir(own_stores()[0]) as found:
        return [entry.path for entry in found]


def damage(compute: sky.Compute, how: str) -> None:
    found = stored() >> compute
    assert found
    for path in map(Path, found):
        if how == "deleted":
            path.unlink()
        else:
            with path.open("r+b") as file:
                file.write(b"damaged")


@pytest.mark.parametrize("how", ["deleted", "changed"])
def test_what_is_damaged_in_the_store_is_sent_again(compute: sky.Compute, how: str) -> None:
    """A cleaner or a full disk may have done it. An array is not a copy: functions use the memory of the store."""
    numpy = pytest.importorskip("numpy")
    value = numpy.frombuffer(os.urandom(SIZE), dtype="u1")
    digest = hashlib.sha256(value).hexdigest()

    @sky.function
    def hashed(given: Any) -> str:
        return hashlib.sha256(given).hexdigest()

    for _ in range(3):
        assert hashed(value) >> compute == digest
    damage(compute, how)
    assert hashed(value) >> compute == digest
    assert list(compute.map(hashed, [value, value])) == [digest, digest]
    assert hashed(value) @ compute == [digest]
    damage(compute, how)
    with pytest.raises(sky.BroadcastError) as caught:
        hashed(value) @ compute
    [error] = caught.value.exceptions
    assert "an argument was deleted or changed in the host's store" in str(error)
    assert "make the call again" in str(error.hint)  # type: ignore[attr-defined]
    assert hashed(value) @ compute == [digest]
    assert hashed(value) >> compute == digest


def test_what_a_function_uses_is_sent_again_if_it_is_no_longer_in_the_store(compute: sky.Compute) -> None:
    numpy = pytest.importorskip("numpy")
    value = numpy.frombuffer(os.urandom(SIZE), dtype="u1")
    digest = hashlib.sha256(value).hexdigest()

    @sky.function
    def uses(exits: bool) -> str:
        if exits:
            os._exit(3)
        return hashlib.sha256(value).hexdigest()

    assert uses(False) >> compute == digest
    damage(compute, "deleted")
    assert uses(False) >> compute == digest, "its process has it"
    with pytest.raises(sky.WorkerDied):
        uses(True) >> compute
    assert uses(False) >> compute == digest
