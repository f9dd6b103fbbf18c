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
from skyfab.host.agent.store import seal
from skyfab.host.channel import Channel
from skyfab.host.relay import BROKEN, DAMAGED, HASH, StoreRelay, chunks_of, hash_of
from skyfab.pool.chain import ChainHost

MIB = 1 << 20
NOTHING = (0, 0, b"")
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

    def make_one(name: str, *, keep: bool = False) -> StoreRelay:
        folders = [str(tmp_path / name / kind) for kind in ("run", "cache")]
        monkeypatch.setattr(relay, "own_stores", lambda: folders)
        made.append(StoreRelay([(hashlib.sha256(data).hexdigest(), len(data))], keep, keys or ("", "")))
        return made[-1]

    yield make_one
    for one in made:
        one._leave_source()
        one.close()
    for channel in Noted.made:
        channel.end()
    Noted.made.clear()


def hashed(data: bytes, first: int = 0) -> tuple[int, bytes]:
    """The hashes of all chunks from this one on, as the client sends them."""
    return first, b"".join(hash_of(data[start:end]) for _, start, end in chunks_of([len(data)])[first:])


def send(host: StoreRelay, data: bytes, number: int) -> tuple[int, str, int]:
    """Sends one chunk with its hash."""
    _, start, end = chunks_of([len(data)])[number]
    return host.chunk(number, hash_of(data[start:end]), memoryview(data)[start:end])


def fill(host: StoreRelay, data: bytes) -> None:
    for number in range(4):
        assert send(host, data, number)[:2] == (number + 1, "")


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
    for one in (second, third):
        one.look(0, *hashed(data))
    send(first, data, 0)
    until(lambda: third.look(*NOTHING)[0] == 1)
    with pytest.raises(OSError):  # nothing listens any more
        until(lambda: socket.create_connection(("127.0.0.1", port)).close())
    for number in (1, 2, 3):
        send(first, data, number)
    assert third.look(60, 0, b"")[:2] == (4, "")
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
    third.look(0, *hashed(data))
    assert second.look(60, *hashed(data))[:2] == (1, DAMAGED)
    until(lambda: third.look(*NOTHING)[0] == 1)
    send(second, data, 1)
    until(lambda: third.look(*NOTHING)[0] == 2)


def test_a_chunk_of_a_neighbor_waits_for_its_hash(make: Make, data: bytes) -> None:
    first, second = make("a"), make("b")
    fill(first, data)
    connect(second, first)
    assert second.look(60, 0, b"")[:2] == (0, ""), "it has come, and says at once that its hash is needed"
    assert second.look(60, 0, hashed(data)[1][: 2 * HASH])[:2] == (2, "")
    assert second.look(0, 3, hashed(data)[1][3 * HASH :])[:2] == (2, ""), "not that of the next one"
    assert second.look(60, *hashed(data, 2))[:2] == (4, "")


def test_chunks_of_the_client_are_checked_too(make: Make, data: bytes) -> None:
    one = make("a")
    assert send(one, data, 1)[:2] == (0, ""), "it is not the next one"
    assert one.chunk(0, hash_of(data[:MIB]), memoryview(bytes(MIB)))[:2] == (0, DAMAGED)
    fill(one, data)


def test_a_source_that_ends(make: Make, data: bytes) -> None:
    first, second = make("a"), make("b")
    connect(second, first)
    Noted.made[0].close()
    assert second.look(60, 0, b"")[:2] == (0, BROKEN)


def test_a_whole_that_does_not_have_its_name(make: Make, data: bytes, tmp_path: Path) -> None:
    """As what a hostile host says about the hashes of chunks would lead to."""
    one = make("a")
    fill(one, data)
    one._contents[0][0] ^= 1
    with pytest.raises(OSError, match="arrived damaged"):
        one.commit(True)
    assert [path.name[0] for path in (tmp_path / "a/run").iterdir()] == ["."]


def test_a_blob_that_a_power_cut_has_damaged_is_replaced(
    make: Make, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = hashlib.sha256(data).hexdigest()
    path = tmp_path / "a/cache" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(len(data)))
    seal(str(path), name)
    assert not make("a", keep=True).drafts
    monkeypatch.setattr("skyfab.host.agent.store._started", lambda: 2e9 * 2)
    assert [*make("a", keep=True).drafts] == [0]


@pytest.mark.parametrize("reply", [None, [5, ""], [-1, "", 0], [9, "", 0], [2, "other", 0], ["2", "", 0]])
def test_hostile_replies_of_a_relay_are_typed_errors(reply: object) -> None:
    host = ChainHost(SimpleNamespace(name="node1"), SimpleNamespace())  # type: ignore[arg-type]
    host.begin(None)
    with pytest.raises(sky.ProtocolError, match="node1"):
        host.note(SimpleNamespace(result=lambda: reply), 8)
