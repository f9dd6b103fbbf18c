"""The workers of a relay, two of them in this process: what they take, refuse and leave."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from stage.spot import until

import skyfab as sky
from skyfab._util.certificate import new_certificate
from skyfab.host import relay
from skyfab.host.channel import Channel
from skyfab.host.relay import BROKEN, DAMAGED, StoreRelay, chunks_of, hash_of
from skyfab.pool.chain import ChainHost

MIB = 1 << 20
Make = Callable[..., StoreRelay]


class Noted(Channel):
    """A channel that is closed with its test, and not with its process."""

    made: ClassVar[list[Noted]] = []

    def __init__(self, *about: str) -> None:
        super().__init__(*about)
        self.made.append(self)

    def end(self) -> None:
        self.close()
        if self._socket is not None:
            self._socket.close()


@pytest.fixture
def data() -> bytes:
    return os.urandom(3 * MIB + 7)


@pytest.fixture
def make(tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[StoreRelay] = []
    monkeypatch.setattr(relay, "Channel", Noted)
    keys = new_certificate()
    hashes = b"".join(hash_of(data[start:end]) for _, start, end in chunks_of([len(data)]))

    def make_one(name: str, *, keep: bool = False) -> StoreRelay:
        folders = [str(tmp_path / name / kind) for kind in ("run", "cache")]
        monkeypatch.setattr(relay, "own_stores", lambda: folders)
        made.append(StoreRelay([(hashlib.sha256(data).hexdigest(), len(data))], hashes, keep, keys or ("", "")))
        return made[-1]

    yield make_one
    for one in made:
        one._leave_source()
        one.close()
    for channel in Noted.made:
        channel.end()
    Noted.made.clear()


def fill(host: StoreRelay, data: bytes) -> None:
    for number, (_, start, end) in enumerate(chunks_of([len(data)])):
        assert host.chunk(number, memoryview(data)[start:end])[:2] == (number + 1, "")


def connect(host: StoreRelay, source: StoreRelay) -> int:
    (port,) = source.listen("child", ["127.0.0.1"])
    assert host.connect("parent", [("127.0.0.1", port)])
    return port


@pytest.mark.parametrize("sizes", [[], [0], [1], [MIB], [5 * MIB, 0, 3], [3 << 30, 7]])
def test_chunks_cover_all_items(sizes: list[int]) -> None:
    chunks = chunks_of(sizes)
    assert [sum(end - start for item, start, end in chunks if item == one) for one in range(len(sizes))] == sizes
    assert all(0 < end - start <= 4 * MIB for _, start, end in chunks)
    assert chunks == sorted(chunks)


def test_chunks_are_passed_on_while_they_arrive(make: Make, data: bytes, tmp_path: Path) -> None:
    first, second, third = make("a"), make("b"), make("c", keep=True)
    port = connect(second, first)
    connect(third, second)
    first.chunk(0, memoryview(data)[:MIB])
    until(lambda: third.look(0)[0] == 1)
    with pytest.raises(OSError):  # nothing listens any more
        until(lambda: socket.create_connection(("127.0.0.1", port)).close())
    for number in (1, 2, 3):
        first.chunk(number, memoryview(data)[number * MIB : (number + 1) * MIB])
    assert third.look(60)[:2] == (4, "")
    for one in (first, second, third):
        one.commit(True)
    name = hashlib.sha256(data).hexdigest()
    assert [(tmp_path / path).read_bytes() == data for path in (f"a/run/{name}", f"b/run/{name}", f"c/cache/{name}")]
    assert not [*tmp_path.glob("*/*/.*")]
    assert make("a").drafts == {}, "it is in the store"


def test_a_damaged_chunk_of_a_neighbor_is_refused_and_not_passed_on(make: Make, data: bytes) -> None:
    first, second, third = make("a"), make("b"), make("c")
    fill(first, data)
    first._contents[0][MIB + 5] ^= 1
    connect(second, first)
    connect(third, second)
    assert second.look(60)[:2] == (1, DAMAGED)
    until(lambda: third.look(0)[0] == 1)
    second.chunk(1, memoryview(data)[MIB : 2 * MIB])
    until(lambda: third.look(0)[0] == 2)


def test_chunks_of_the_client_are_checked_too(make: Make, data: bytes) -> None:
    one = make("a")
    assert one.chunk(1, memoryview(data)[MIB : 2 * MIB])[:2] == (0, ""), "it is not the next one"
    assert one.chunk(0, memoryview(bytes(MIB)))[:2] == (0, DAMAGED)
    fill(one, data)


def test_a_source_that_ends(make: Make, data: bytes) -> None:
    first, second = make("a"), make("b")
    connect(second, first)
    Noted.made[0].close()
    assert second.look(60)[:2] == (0, BROKEN)


def test_a_whole_that_does_not_have_its_name(make: Make, data: bytes, tmp_path: Path) -> None:
    """As what a hostile host says about the hashes of chunks would lead to."""
    one = make("a")
    fill(one, data)
    one._contents[0][0] ^= 1
    with pytest.raises(OSError, match="arrived damaged"):
        one.commit(True)
    assert [path.name[0] for path in (tmp_path / "a/run").iterdir()] == ["."]


def test_a_blob_of_another_size_is_replaced(make: Make, data: bytes, tmp_path: Path) -> None:
    name = hashlib.sha256(data).hexdigest()
    (tmp_path / "a/run").mkdir(parents=True)
    (tmp_path / "a/run" / name).write_bytes(data[:-1])
    one = make("a")
    assert [*one.drafts] == [0]
    fill(one, data)
    one.commit(False)
    assert (tmp_path / "a/run" / name).read_bytes() == data


@pytest.mark.parametrize("reply", [None, [5, ""], [-1, "", 0], [9, "", 0], [2, "other", 0], ["2", "", 0]])
def test_hostile_replies_of_a_relay_are_typed_errors(reply: object) -> None:
    host = ChainHost(SimpleNamespace(name="node1"), SimpleNamespace())  # type: ignore[arg-type]
    host.begin(None)
    with pytest.raises(sky.ProtocolError, match="node1"):
        host.note(SimpleNamespace(result=lambda: reply), 8)
