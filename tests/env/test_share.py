"""Packages that several hosts lack leave this machine once, and never hold up a host that gets nothing in this way."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from stage import labs, remote
from stage.index import Index, sha256
from stage.spot import until
from stage.threads import at_once

import skyfab as sky
from skyfab.env.install import Package
from skyfab.env.share import Delivery, Sharing
from skyfab.lab import Lab
from skyfab.ui.events import Event, Moved

MIB = 1 << 20
HOSTS = [sky.Host(name=f"node{number}") for number in (1, 2, 3)]
pytestmark = pytest.mark.usefixtures("world")
version_of = sky.function(remote.version_of)


# ---- how hosts meet


class Report:
    def __init__(self) -> None:
        self.moves: list[tuple[str, int, int]] = []

    def moved(self, what: str, done: int, total: int) -> None:
        self.moves.append((what, done, total))

    def step(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...


class Pool:
    """Notes deliveries."""

    def __init__(self, act: Callable[[Sharing], None] = lambda sharing: None) -> None:
        self.found: list[tuple[list[str], list[str]]] = []
        self._act = act

    def __call__(self, deliveries: Any, sharing: Sharing) -> None:
        for each in deliveries:
            assert isinstance(each, Delivery)
            self.found.append(([host.name for host in each.hosts], sorted(path.name for path in each.files.values())))
        self._act(sharing)


@pytest.fixture
def packages(tmp_path: Path) -> list[Package]:
    """Two that are worth it together, and one more."""
    for name, size in (("a", 3 * MIB), ("b", MIB), ("c", 10)):
        (tmp_path / name).write_bytes(os.urandom(size))
    return [Package.of_file(tmp_path / name) for name in ("a", "b", "c")]


Lack = tuple[sky.Host, list[Package], Report]


def lack(host: sky.Host, packages: list[Package]) -> Lack:
    return host, packages, Report()


def shared(sharing: Sharing, *lacks: Lack) -> list[bool]:
    with ThreadPoolExecutor(len(lacks)) as threads:
        waits = [threads.submit(sharing.share, *one, lambda: None) for one in lacks]
        return [wait.result() for wait in waits]


def names(places: list[sky.Host]) -> list[str]:
    return [host.name for host in places]


def test_what_several_hosts_lack_is_delivered_to_those_that_lack_it(packages: list[Package]) -> None:
    pool = Pool()
    sharing = Sharing(HOSTS, pool, 60)
    lacks = [lack(host, some) for host, some in zip(HOSTS, (packages[:2], packages, packages[:2]), strict=True)]
    assert shared(sharing, *lacks) == [True] * 3
    ((found, files),) = pool.found
    assert (sorted(found), files) == (names(HOSTS), ["a", "b"]), "one host alone lacks the third"


def test_hosts_that_lack_different_packages(packages: list[Package]) -> None:
    pool = Pool()
    sharing = Sharing(HOSTS, pool, 60)
    shared(sharing, *(lack(host, some) for host, some in zip(HOSTS, (packages, packages, packages[:1]), strict=True)))
    assert sorted((sorted(found), files) for found, files in pool.found) == [
        (names(HOSTS[:2]), ["b", "c"]),
        (names(HOSTS), ["a"]),
    ]


def test_small_packages_are_not_worth_it(packages: list[Package]) -> None:
    pool = Pool()
    shared(Sharing(HOSTS[:2], pool, 60), *(lack(host, packages[1:]) for host in HOSTS[:2]))
    assert pool.found == []


def test_hosts_that_take_no_part_are_not_waited_for(packages: list[Package]) -> None:
    here = sky.Host(name="here", transport="local")
    pool = Pool()
    sharing = Sharing([*HOSTS, here], pool, 60)
    sharing.leave(HOSTS[2])
    assert shared(sharing, *(lack(host, packages) for host in HOSTS[:2])) == [True, True]
    assert len(pool.found) == 1


def test_a_host_that_comes_late_is_not_waited_for_and_does_not_wait(packages: list[Package]) -> None:
    pool = Pool()
    sharing = Sharing(HOSTS, pool, 0.05)
    assert shared(sharing, *(lack(host, packages) for host in HOSTS[:2])) == [True, True]
    assert sharing.share(*lack(HOSTS[2], packages), lambda: None) is False
    assert sharing.share(*lack(HOSTS[0], packages), lambda: None) is False, "nor does one that comes again"
    assert len(pool.found) == 1


def test_without_a_pool_nobody_waits(packages: list[Package]) -> None:
    assert Sharing(HOSTS, None, 60).share(*lack(HOSTS[0], packages), lambda: None) is False


def test_a_delivery_that_fails_is_none(packages: list[Package]) -> None:
    def fail(sharing: Sharing) -> None:
        raise sky.HostUnfit("no")

    assert shared(Sharing(HOSTS[:2], Pool(fail), 60), *(lack(host, packages) for host in HOSTS[:2])) == [True, True]


def test_a_host_that_has_its_packages_waits_no_longer(packages: list[Package]) -> None:
    first_is_gone = threading.Event()

    def settle(sharing: Sharing) -> None:
        sharing.moved(HOSTS[0], 1, 2)
        sharing.settle(HOSTS[0])
        assert first_is_gone.wait(60)

    sharing = Sharing(HOSTS[:2], Pool(settle), 60)
    first, second = (lack(host, packages) for host in HOSTS[:2])
    with ThreadPoolExecutor() as threads:
        waits = [threads.submit(sharing.share, *one, lambda: None) for one in (first, second)]
        assert waits[0].result(60)
        assert not waits[1].done()
        first_is_gone.set()
        assert waits[1].result(60)
    assert ("pushing", 1, 2) in first[2].moves


def test_a_pool_that_is_closed_waits_no_longer(packages: list[Package]) -> None:
    """What delivers sees it once no host waits."""
    is_closed, is_abandoned = threading.Event(), threading.Event()

    def notice(sharing: Sharing) -> None:
        assert not sharing.is_abandoned
        is_closed.set()
        until(lambda: sharing.is_abandoned)
        is_abandoned.set()

    def check() -> None:
        if is_closed.is_set():
            raise sky.HostLost("the pool was closed")

    sharing = Sharing(HOSTS[:2], Pool(notice), 60)
    with ThreadPoolExecutor() as threads:
        waits = [threads.submit(sharing.share, *lack(host, packages), check) for host in HOSTS[:2]]
        assert all(isinstance(wait.exception(60), sky.HostLost) for wait in waits)
    assert is_abandoned.wait(60)


def test_without_a_thread_for_the_relay_hosts_are_sent_their_packages_directly(
    packages: list[Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()

    def check() -> None:
        if is_over.is_set():
            raise sky.HostLost("it still waits")

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool = Pool()
    sharing = Sharing(HOSTS[:2], pool, 60)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(sharing.share, *lack(HOSTS[0], packages), check)
        until(lambda: not sharing.is_abandoned)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        try:
            assert sharing.share(*lack(HOSTS[1], packages), check)
            assert first.result(60)
        finally:
            is_over.set()
    assert pool.found == []


# ---- on hosts of the lab


Fresh = Callable[..., list[sky.Host]]


def left(lab: Lab) -> int:
    """Bytes that have left this machine for the hosts of the lab."""
    return int(Path(f"/sys/class/net/{lab.hosts[0].network.bridge}/statistics/tx_bytes").read_text())


def large(index: Index, size: int = 8 * MIB) -> Path:
    return index.add("shelf", "1.0", files={"shelf/data.bin": os.urandom(size)})


def versions(hosts: list[sky.Host], watch: Callable[[Event], None] = lambda event: None) -> list[str]:
    compute = sky.Compute(hosts, image=sky.Image(pip=["shelf"]), ui="none")
    compute.events.subscribe(watch)
    with compute:
        return list(version_of("shelf") @ compute)


def sent(lab: Lab, host: sky.Host) -> int:
    """Bytes of all packages of a host."""
    found = lab[host.name].run(["find", f"{host.cache}/packages", "-type", "f", "-printf", "%s\\n"])
    return sum(map(int, found.stdout.split()))


def test_packages_leave_this_machine_once(fresh: Fresh, index: Index, namespaces: Lab) -> None:
    large(index)
    hosts = fresh("openssh", 2)
    before = left(namespaces)
    assert versions(hosts) == ["1.0"] * 2
    assert left(namespaces) - before < 1.1 * sent(namespaces, hosts[0]) + 4 * MIB, "each gets skyfab itself too"
    assert len({sent(namespaces, host) for host in hosts}) == 1
    assert not any(host.run(["pgrep", "-f", "skyfab-agent"], check=False).stdout for host in namespaces.hosts)


@pytest.mark.slow
def test_a_package_that_is_damaged_on_a_neighbours_disk(fresh: Fresh, index: Index, namespaces: Lab) -> None:
    """It is not taken, and the neighbor does not install it either."""
    wheel = large(index)
    hosts = fresh("openssh", 2)
    data = wheel.read_bytes()
    first, cache = namespaces[hosts[0].name], hosts[0].cache
    first.run(["mkdir", "-p", f"{cache}/blobs"])
    first.path(f"{cache}/blobs/{sha256(wheel)}").write_bytes(data[:-MIB] + bytes(MIB))
    first.run(["chmod", "-R", "go-rwx", cache])
    assert versions(hosts) == ["1.0"] * 2
    for host in hosts:
        path = namespaces[host.name].path(f"{host.cache}/packages/{sha256(wheel)}/{wheel.name}")
        assert path.read_bytes() == data


@pytest.mark.slow
def test_a_full_disk_fails_alone(fresh: Fresh, index: Index, namespaces: Lab) -> None:
    large(index, 30 * MIB)
    hosts = fresh("openssh", 3)
    host = namespaces[hosts[1].name]
    host.run(["mkdir", "-p", hosts[1].cache])
    host.small_disk(hosts[1].cache, 20)
    with pytest.raises(sky.HostUnfit) as raised:
        versions(hosts)
    assert raised.value.host == hosts[1].name and "skyfab gc" in str(raised.value.hint)
    assert not any(name.startswith(".") for name in host.run(["ls", "-A", f"{hosts[1].cache}/blobs"]).stdout.split())
    assert versions([hosts[0], hosts[2]]) == ["1.0"] * 2


@pytest.mark.slow
def test_a_host_that_is_lost_meanwhile(index: Index) -> None:
    """The others go on, and are ready; opened again, they have all of it."""
    large(index, 24 * MIB)
    with labs.start(3, python="/usr/bin/python3") as lab:
        hosts = [dataclasses.replace(host, python="auto") for host in sky.Inventory.of(lab.inventory).hosts.values()]
        victim = lab[hosts[1].name]
        for host in lab.hosts:
            host.slow(100)
        ready: set[str] = set()
        is_far = threading.Event()

        def watch(event: Event) -> None:
            if isinstance(event, Moved) and event.what == "pushing" and event.total / 4 < event.done < event.total / 2:
                is_far.set()
            if getattr(event, "state", "") == "ready":
                ready.add(event.host)  # type: ignore[union-attr]

        def lose() -> None:
            assert is_far.wait(100)
            victim.cut()

        def open_it() -> sky.SkyfabError | None:
            try:
                versions(hosts, watch)
            except sky.SkyfabError as error:
                return error
            return None

        failed, _ = at_once(lambda action: action(), [open_it, lose])
        assert isinstance(failed, sky.HostError) and failed.host == hosts[1].name
        assert ready == {hosts[0].name, hosts[2].name}
        assert versions([hosts[0], hosts[2]]) == ["1.0"] * 2


@pytest.mark.slow
def test_hosts_that_do_not_reach_each_other(index: Index) -> None:
    large(index)
    with labs.start(2, python="/usr/bin/python3", isolated=True) as lab:
        hosts = [dataclasses.replace(host, python="auto") for host in sky.Inventory.of(lab.inventory).hosts.values()]
        assert versions(hosts) == ["1.0"] * 2
