"""Relays on real hosts: what several of them need leaves this machine once."""

from __future__ import annotations

import gc
import hashlib
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stage.spot import until

import skyfab as sky
from skyfab.lab import Lab
from skyfab.pool import relay
from skyfab.pool.chain import CHAIN, plan

pytestmark = pytest.mark.lab
MIB = 1 << 20


def item(size: int) -> tuple[str, bytes]:
    data = os.urandom(size)
    return hashlib.sha256(data).hexdigest(), data


@sky.function
def stored(name: str) -> str:
    """The hash of what the store has under a name."""
    from skyfab.context import own_stores

    for folder in own_stores():
        path = Path(folder) / name
        if path.exists():
            return hashlib.sha256(path.read_bytes()).hexdigest()
    return ""


def left(lab: Lab) -> int:
    """Bytes that have left this machine for the hosts of the lab."""
    return int(Path(f"/sys/class/net/{lab.hosts[0].network.bridge}/statistics/tx_bytes").read_text())


@pytest.mark.parametrize("count", [0, 1, 17, 40])
def test_the_plan(count: int) -> None:
    parents = plan(count)
    assert len(parents) == count
    assert [place for place, parent in enumerate(parents) if parent is None] == [0][:count]
    for place, parent in enumerate(parents):
        assert parent is None or parent < place
    assert all(parents.count(place) <= 2 for place in range(count)), "nobody sends more than twice"
    assert parents[:CHAIN] == [None, *range(CHAIN - 1)][:count]


@sky.function
def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def pool(lab: Lab, hosts_of: Callable[..., list[sky.Host]]) -> Iterator[sky.Compute]:
    if lab.kind != "namespace":
        pytest.skip(lab.limits[0])
    with sky.Compute(hosts_of("openssh", 4), ui="none") as compute:
        yield compute


def test_it_leaves_this_machine_once(lab: Lab, pool: sky.Compute) -> None:
    items = dict([item(20 * MIB + 5), item(3 * MIB), item(1), item(0)])
    before = left(lab)
    assert pool.relay.send(items, pool.hosts) == {}
    assert left(lab) - before < 1.1 * sum(map(len, items.values()))
    for name in items:
        assert stored(name) @ pool == [name] * 4
    before = left(lab)
    assert pool.relay.send(items, pool.hosts, keep=True) == {}
    assert left(lab) - before < 100_000, "all hosts have it"


def test_what_only_other_hosts_have(lab: Lab, pool: sky.Compute) -> None:
    """One of two items is empty, and this machine has none."""
    (name, data), (empty, _) = item(5 * MIB), item(0)
    assert pool.relay.send({name: data, empty: b""}, pool.hosts[:1]) == {}
    before = left(lab)
    assert pool.relay.send({name: 5 * MIB, empty: 0}, pool.hosts[2:], holders=pool.hosts[:2]) == {}
    assert left(lab) - before < 100_000
    assert [*map(bool, stored(name) @ pool)] == [True, False, True, True]
    assert [*map(bool, stored(empty) @ pool)][2:] == [True, True]


def test_a_file(pool: sky.Compute, tmp_path: Path) -> None:
    name, data = item(6 * MIB)
    path = tmp_path / "file"
    path.write_bytes(data)
    seen: list[tuple[int, int]] = []
    assert (
        pool.relay.send({name: path}, pool.hosts, progress=lambda node, done, total: seen.append((done, total))) == {}
    )
    assert stored(name) @ pool == [name] * 4
    assert max(seen) == (len(data), len(data))
    path.write_bytes(data[:-1] + b"x")
    other = hashlib.sha256(data + b"x").hexdigest()
    with pytest.raises(sky.UsageError, match="changed while it was being sent"):
        pool.relay.send({other: path}, pool.hosts)


def test_arguments_of_a_broadcast(lab: Lab, pool: sky.Compute) -> None:
    data = os.urandom(16 * MIB)
    ref = pool.put(data)
    before = left(lab)
    assert digest(ref) @ pool == [digest.fn(data)] * 4
    assert left(lab) - before < 1.1 * len(data)
    before = left(lab)
    assert digest(ref) @ pool == [digest.fn(data)] * 4
    assert left(lab) - before < 100_000


class Array(bytearray):
    """Is sent as an array is: from its own memory. Arrives as bytes."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return bytes, (pickle.PickleBuffer(self),)


def test_arguments_are_freed_when_their_call_has_ended(pool: sky.Compute) -> None:
    """Not only by the garbage collector, which does not know how large they are."""
    gc.collect()
    gc.disable()
    try:
        data = Array(os.urandom(8 * MIB))
        freed = weakref.ref(data)
        assert digest(data) @ pool == [hashlib.sha256(data).hexdigest()] * 4
        del data
        until(lambda: freed() is None)
    finally:
        gc.enable()


def test_an_argument_that_is_modified_meanwhile_is_an_error(
    lab: Lab, pool: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is stored under the name of other content: a later call with that content gets it."""
    array = Array(os.urandom(16 * MIB))
    before = bytes(array)
    original = relay._Items.__init__

    def modified(self: Any, *args: Any) -> None:
        array[-1] ^= 1
        original(self, *args)

    monkeypatch.setattr(relay._Items, "__init__", modified)
    with pytest.raises(sky.BroadcastError) as caught:
        digest(array) @ pool
    assert "do not modify it until the call has ended, or pass a copy" in str(caught.value)
    monkeypatch.undo()
    array[-1] ^= 1
    assert bytes(array) == before
    assert digest(array) @ pool == [digest.fn(before)] * 4


@sky.function
def model(seed: int, differs: bool = False) -> dict[str, Any]:
    """What ranks return after a training: equal weights, and a loss of their own."""
    import random

    rank = sky.instance_info().rank
    shared = Weights(random.Random(seed).randbytes(4 * MIB))
    own = Weights(random.Random(rank + 1).randbytes(2 * MIB)) if differs else shared
    return {"loss": rank, "shared": shared, "again": shared, "own": own}


class Weights:
    """Has its memory out of band, as arrays have."""

    def __init__(self, data: Any) -> None:
        self.data = data if isinstance(data, bytearray) else bytearray(data)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Weights, (pickle.PickleBuffer(self.data),)


def test_equal_large_results_are_fetched_once(lab: Lab, pool: sky.Compute) -> None:
    pool.broadcast(model(0), collect="head")
    before = came(lab)
    found = pool.broadcast(model(1), collect="head")
    assert came(lab) - before < 1.1 * 4 * MIB
    assert [one["loss"] for one in found] == [0, 1, 2, 3]
    assert len({bytes(one["shared"].data) for one in found}) == 1
    assert len({id(one["shared"].data) for one in found}) == 4, "each has memory of its own"
    assert all(one["again"] is one["shared"] is one["own"] for one in found)


def came(lab: Lab) -> int:
    """Bytes that have come from the hosts of the lab."""
    return int(Path(f"/sys/class/net/{lab.hosts[0].network.bridge}/statistics/rx_bytes").read_text())
