"""Relays while hosts are lost, slow, full, cleaned or damaged: the others get all, and nobody begins again."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cable
import pytest
from stage import labs
from stage.spot import until

import skyfab as sky
from skyfab.lab import Lab
from skyfab.ui.events import Event, Notice

pytestmark = pytest.mark.lab
MIB = 1 << 20
SMALL = "/small"
KILL = """
for maps in /proc/[0-9]*/maps; do
    if grep -q '/blobs/[.]' $maps; then pid=${maps#/proc/}; kill -9 ${pid%/*} && exit; fi
done
exit 1"""
"""Kills the worker of a relay, on the host itself."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with labs.start_for_calls(4) as lab:
        cable.settle(lab.hosts)
        yield lab


@sky.function
def stored(name: str) -> str:
    """The hash of what the store has under a name."""
    from skyfab.context import own_stores

    for folder in own_stores():
        path = Path(folder) / name
        if path.exists():
            return hashlib.sha256(path.read_bytes()).hexdigest()
    return ""


@sky.function
def damage(name: str, data: bytes) -> None:
    """As a disk does, after the blob was stored: its times are the same."""
    from skyfab.context import own_stores
    from skyfab.host.agent.store import seal

    folder = Path(own_stores()[0])
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(data)
    seal(str(folder / name), name)


@sky.function
def drafts() -> int:
    from skyfab.context import own_stores

    return sum(len([*Path(folder).glob(".*")]) for folder in own_stores())


def item(size: int) -> tuple[str, bytes]:
    data = os.urandom(size)
    return hashlib.sha256(data).hexdigest(), data


class Sending:
    """A relay to all hosts of a pool, on a thread, over links of `mbit`."""

    def __init__(self, lab: Lab, pool: sky.Compute, size: int = 24 * MIB, mbit: float = 50) -> None:
        self.name, data = item(size)
        self.notices: list[str] = []
        self.errors: dict[Any, Exception] = {}
        self.far = threading.Event()
        """A host has a quarter of it."""
        self.done: set[str] = set()
        """Hosts that have all of it."""
        for host in lab.hosts:
            host.slow(mbit)
        pool.events.subscribe(self._listen)

        def progress(node: Any, done: int, total: int) -> None:
            if done > total / 4:
                self.far.set()
            if done == total:
                self.done.add(node.name)

        def send() -> None:
            self.errors = pool.relay.send({self.name: data}, pool.hosts, progress=progress)

        self._thread = threading.Thread(target=send)
        self._thread.start()

    def _listen(self, event: Event) -> None:
        if isinstance(event, Notice):
            self.notices.append(str(event))

    def join(self) -> None:
        self._thread.join(100)
        assert not self._thread.is_alive()


def has(pool: sky.Compute, name: str, *hosts: int) -> None:
    for number in hosts:
        assert pool.submit(stored(name), on=f"node{number}").result() == name


@pytest.mark.slow
@pytest.mark.usefixtures("hurry")
def test_a_host_that_is_lost(lab: Lab, open_pool: Callable[..., sky.Compute]) -> None:
    """Its successors take the rest from its predecessor, long before it is known to be lost."""
    pool = open_pool("openssh", count=4, lease=15)
    sending = Sending(lab, pool)
    assert sending.far.wait(60)
    cable.silence([lab["node2"]])
    sending.join()
    assert [node.name for node in sending.errors] == ["node2"]
    has(pool, sending.name, 1, 3, 4)
    assert any(line.startswith("node3: node2 ") for line in sending.notices), sending.notices


@pytest.mark.slow
def test_a_short_cut_of_all_cables(lab: Lab, open_pool: Callable[..., sky.Compute]) -> None:
    pool = open_pool("openssh", count=4, lease=60)
    sending = Sending(lab, pool)
    with cable.Cable(lab, 27, [1.0, 4.0, 0.5], hosts=lab.hosts, longest=5) as cuts:
        cuts.wait()
    for host in lab.hosts:
        host.slow(None)
    sending.join()
    assert sending.errors == {}
    has(pool, sending.name, 1, 2, 3, 4)


@pytest.mark.slow
def test_a_slow_host_delays_no_other_one(lab: Lab, open_pool: Callable[..., sky.Compute]) -> None:
    pool = open_pool("openssh", count=4)
    sending = Sending(lab, pool, 20 * MIB, mbit=20)
    lab["node2"].slow(2)
    until(lambda: {"node1", "node3", "node4"} <= sending.done)
    assert "node2" not in sending.done
    lab["node2"].slow(None)
    sending.join()
    assert sending.errors == {}
    assert any(line.startswith("node3: node2 ") for line in sending.notices), sending.notices
    has(pool, sending.name, 1, 2, 3, 4)


def test_a_full_disk_fails_alone(lab: Lab, hosts_of: Callable[..., list[sky.Host]]) -> None:
    from dataclasses import replace

    host = lab["node2"]
    host.run(["mkdir", "-p", SMALL])
    host.small_disk(SMALL, 20)
    one, two, three = hosts_of("openssh", 3)
    try:
        with sky.Compute([one, replace(two, cache=f"{SMALL}/cache"), three], ui="none") as pool:
            name, data = item(24 * MIB)
            errors = pool.relay.send({name: data}, pool.hosts)
            assert [node.name for node in errors] == ["node2"]
            (error,) = errors.values()
            assert isinstance(error, sky.HostUnfit)
            assert "No space left" in str(error)
            assert error.hint is not None
            assert "put the cache on another disk" in error.hint
            has(pool, name, 1, 3)
            assert drafts() @ pool == [0, 0, 0]
            small, data = item(5 * MIB)
            assert pool.relay.send({small: data}, pool.hosts) == {}
            has(pool, small, 1, 2, 3)
    finally:
        host.run(["umount", SMALL])


def test_a_blob_that_is_damaged_on_a_disk(lab: Lab, open_pool: Callable[..., sky.Compute]) -> None:
    """Who sent it is named, and nobody takes it from there."""
    pool = open_pool("openssh", count=4)
    name, data = item(9 * MIB)
    pool.submit(damage(name, data[:-1] + bytes([data[-1] ^ 1])), on="node2").result()
    notices: list[str] = []
    pool.events.subscribe(lambda event: notices.append(str(event)) if isinstance(event, Notice) else None)
    assert pool.relay.send({name: data}, pool.hosts) == {}
    has(pool, name, 1, 3, 4)
    assert "node3: node2 sent a damaged chunk; the rest comes from node1" in notices
    assert "node1: node2 sent a damaged chunk; the rest comes from this machine" in notices


@pytest.mark.slow
def test_a_store_that_is_cleaned_meanwhile(lab: Lab, open_pool: Callable[..., sky.Compute]) -> None:
    pool = open_pool("openssh", count=4)
    sending = Sending(lab, pool)
    assert sending.far.wait(60)
    lab["node3"].run(["sh", "-c", "rm -rf ~/.cache/skyfab/run/*/*/blobs"])
    sending.join()
    assert sending.errors == {}
    has(pool, sending.name, 1, 2, 3, 4)


@pytest.mark.slow
def test_workers_that_are_killed(lab: Lab, open_pool: Callable[..., sky.Compute]) -> None:
    """That of the second host: the others go on, and a call that needs its content sends it again."""
    pool = open_pool("openssh", count=4)
    data = os.urandom(24 * MIB)
    for host in lab.hosts:
        host.slow(50)
    future = pool.submit(sky.function(len)(pool.put(data)), on="all")
    until(lambda: lab["node2"].run(["sh", "-c", KILL], check=False).returncode == 0)
    for host in lab.hosts:
        host.slow(None)
    assert future.result(100) == [len(data)] * 4


@pytest.mark.slow
def test_hosts_that_do_not_reach_each_other() -> None:
    """They get it from here, and try only once to reach each other."""
    with labs.start_for_calls(3, isolated=True) as lab, ExitStack() as ends:
        hosts = list(sky.Inventory.of(lab.inventory).hosts.values())
        pool = ends.enter_context(sky.Compute(hosts, ui="none"))
        for _ in range(2):
            name, data = item(6 * MIB)
            assert pool.relay.send({name: data}, pool.hosts) == {}
            has(pool, name, 1, 2, 3)
        assert pool.relay.apart == {frozenset({"node1", "node2"}), frozenset({"node2", "node3"})}


@pytest.mark.slow
def test_more_hosts_than_a_chain_has() -> None:
    with labs.start_for_calls(18) as lab:
        hosts = list(sky.Inventory.of(lab.inventory).hosts.values())
        with sky.Compute(hosts, ui="none") as pool:
            name, data = item(12 * MIB)
            bridge = Path(f"/sys/class/net/{lab.hosts[0].network.bridge}/statistics/tx_bytes")
            before = int(bridge.read_text())
            assert pool.relay.send({name: data}, pool.hosts) == {}
            assert int(bridge.read_text()) - before < 1.2 * len(data)
            assert stored(name) @ pool == [name] * 18
