"""The hashes of a relay's chunks: computed when they are needed, once, for all threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import skyfab as sky
from skyfab.host.relay import HASH
from skyfab.pool import chain
from skyfab.pool.chain import Hashes


def one(number: int) -> bytes:
    return number.to_bytes(HASH, "big")


def numbered(count: int, computed: list[int]) -> Iterator[bytes]:
    for number in range(count):
        computed.append(number)
        yield one(number)


def test_only_those_that_are_needed_are_computed_and_each_once() -> None:
    computed: list[int] = []
    hashes = Hashes(numbered(10, computed))
    assert hashes.some(2, 4) == one(2) + one(3)
    assert computed == [0, 1, 2, 3]
    assert hashes.some(0, 3) == one(0) + one(1) + one(2)
    assert hashes.some(4, 4) == b""
    assert computed == [0, 1, 2, 3]


def test_what_takes_long_is_returned_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "_LOOK", 0.0)
    hashes = Hashes(numbered(10, []))
    assert hashes.some(3, 9) == one(3), "at least the first"
    assert hashes.some(0, 9) == b"".join(map(one, range(4)))


def test_an_error_is_raised_for_all_that_ask_for_further_ones() -> None:
    def source() -> Iterator[bytes]:
        yield one(0)
        raise sky.UsageError("changed")

    hashes = Hashes(source())
    for _ in range(2):
        with pytest.raises(sky.UsageError, match="changed"):
            hashes.some(1, 2)
        assert hashes.some(0, 1) == one(0)
    assert isinstance(hashes.error, sky.UsageError)
