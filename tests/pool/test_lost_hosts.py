"""Hosts that vanish: what runs there fails or moves, the others go on, and who answers again is taken back."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stage import labs
from stage.remote import leave, wait_for
from stage.spot import Spot, until

import skyfab as sky
from skyfab.lab import Lab
from skyfab.session import timing

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Two hosts that may be broken. A parameter is the interpreter that they are lent."""
    python = getattr(request, "param", None)
    with labs.start(2, python=python) if python else labs.start_for_calls(2) as own:
        yield own


@pytest.fixture
def place(pair: Lab) -> Iterator[Spot]:
    found = Spot(pair.hosts)
    yield found
    found.close()


@pytest.fixture
def pool(pair: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., sky.Compute]]:
    """A pool that loses patience in seconds."""
    monkeypatch.setattr(timing, "HEARTBEAT", 0.3)
    monkeypatch.setattr(timing, "SUSPECT_AFTER", 1.0)
    opened: list[sky.Compute] = []

    def open_it(**options: Any) -> sky.Compute:
        inventory = sky.Inventory.of(pair.inventory)
        options = {"heartbeat_timeout": 2, "lease": 20, "ui": "none", **options}
        gpus = options.pop("gpus", "auto")
        hosts = [replace(host, gpus=gpus) for host in inventory.select("node1,node2")]
        opened.append(sky.Compute(hosts, inventory=inventory, **options))
        opened[-1].open()
        return opened[-1]

    yield open_it
    for host in pair.hosts:
        host.restore()
    for one in opened:
        one.close()


def stay(path: str, go: str) -> str:
    """Says where it runs, and waits; started again on another host it finds the note and returns at once."""
    name = sky.instance_info().hostname
    leave(f"{path}.{name}")
    if not Path(f"{path}.go").exists():
        wait_for(go, 60)
    return name


def in_collective(path: str) -> float:
    import torch
    import torch.distributed as dist

    leave(path)
    if dist.get_rank() == 1:
        wait_for(f"{path}.go", 60)
    found = torch.ones(1)
    dist.all_reduce(found)
    return found.item()


@pytest.mark.torch
@pytest.mark.parametrize("pair", [sys.executable], ids=["torch"], indirect=True)
@pytest.mark.slow
def test_a_host_that_vanishes_during_a_collective_ends_the_gang(
    pair: Lab, pool: Callable[..., sky.Compute], place: Spot
) -> None:
    """The others are stopped, though no connection of theirs has ended; and a host that is back belongs to the next."""
    pytest.importorskip("torch")
    compute = pool(plugins=[sky.plugins.torch()])
    call = sky.function(in_collective)
    future = compute.submit(call(place / "met"), on="all")
    place.wait("met", 2)
    pair["node2"].cut()
    with pytest.raises(sky.BroadcastError) as raised:
        future.result(170)
    assert isinstance(raised.value.exceptions[0], sky.HostLost)
    assert raised.value.exceptions[0].host == "node2"
    pair["node2"].restore()
    place.leave("met.go")
    until(lambda: compute.hosts[1].lost is None, "node2 is taken back")
    assert call(place / "met") @ compute == [2.0, 2.0]


@pytest.mark.slow
def test_a_call_that_may_be_repeated_moves_to_another_host(
    pair: Lab, pool: Callable[..., sky.Compute], place: Spot
) -> None:
    compute = pool()
    futures = [compute.submit(sky.function(retries=1)(stay)(place / f"at{n}", place / "never")) for n in range(2)]
    for n, name in enumerate(("node1", "node2")):
        place.wait(f"at{n}.{name}")
        place.leave(f"at{n}.go")
    pair["node2"].cut()
    place.leave("never")
    assert futures[0].result(170) == "node1"
    assert futures[1].result(170) == "node1"


def test_a_broadcast_that_may_be_repeated_waits_for_a_host_that_is_rebooted(
    pair: Lab, pool: Callable[..., sky.Compute], place: Spot
) -> None:
    compute = pool(lease=100)
    said: list[str] = []
    compute.events.subscribe(lambda event: said.append(str(event)))
    begun = place / "begun"

    def attempt() -> int:
        number = sky.instance_info().attempt
        if not number:
            leave(begun)
            wait_for(f"{begun}.never", 60)
        return number

    future = compute.submit(sky.function(retries=1)(attempt)(), on="all")
    place.wait("begun", 2)
    pair["node2"].kill()
    until(lambda: any("node2: lost; waiting up to 100 s for it to come back" in line for line in said), "it waits")
    pair["node2"].reboot()
    assert future.result(170) == [1, 1]


def test_the_gpus_of_a_lost_host_are_free_when_it_is_back(
    pair: Lab, pool: Callable[..., sky.Compute], place: Spot
) -> None:
    """What had one of them moves, if it may be repeated; what waits for that host fails."""
    compute = pool(gpus=(0, 1))
    calls = [sky.function(retries=1)(stay)(place / f"on{n}", place / "end") for n in range(4)]
    futures = [compute.submit(call, gpus=1) for call in calls]
    begun = {f"on{n}.node{1 + n % 2}" for n in range(4)}
    until(lambda: begun <= place.names(), "two have begun on each host")
    for n in range(4):
        place.leave(f"on{n}.go")
    waits = compute.submit(sky.function(stay)(place / "on4", place / "end"), gpus=2, on="node2")
    with compute.actor(Total, restarts=1) as total:
        pair["node2"].kill()
        try:
            with pytest.raises(sky.HostLost):
                waits.result(60)
            compute.submit(sky.function(leave)(place / "end"), on="node1").result(60)
            assert [future.result(60) for future in futures] == ["node1"] * 4
            assert total.add(1) == 1
        finally:
            pair["node2"].reboot()
    until(lambda: compute.hosts[1].lost is None, "node2 is taken back")
    name = sky.function(lambda: sky.instance_info().hostname)
    assert compute.submit(name(), gpus=2, on="node2").result(60) == "node2"
    assert compute.submit(name(), gpus=2, on="node1").result(60) == "node1"


class Total:
    def __init__(self) -> None:
        self.value = 0

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value


def test_an_actor_of_a_lost_host_is_lost_or_made_again(pair: Lab, pool: Callable[..., sky.Compute]) -> None:
    compute = pool()
    with compute.actor(Total, on="node1"), compute.actor(Total, restarts=1) as moved:
        lost = compute.actor(Total, on="node2")
        assert [lost.add(1), moved.add(1), repr(moved)] == [1, 1, "<actor Total on node2>"]
        pair["node2"].kill()
        try:
            with pytest.raises(sky.ActorLost, match="its host is lost"):
                lost.add(1)
            with pytest.raises(sky.ActorLost):
                lost.add.submit(1).result(60)
            assert [moved.add(1), repr(moved)] == [1, "<actor Total on node1>"]
        finally:
            pair["node2"].reboot()


def test_a_map_goes_on_without_a_host(pair: Lab, pool: Callable[..., sky.Compute], place: Spot) -> None:
    compute = pool()
    begun = place / "begun"

    def square(number: int) -> int:
        leave(begun)
        if sky.instance_info().hostname == "node2":
            wait_for(f"{begun}.never", 60)
        return number * number

    def cut() -> None:
        place.wait("begun", 2)
        pair["node2"].cut()

    thread = threading.Thread(target=cut)
    thread.start()
    assert compute.map(sky.function(retries=2)(square), range(20)) == [n * n for n in range(20)]
    thread.join()


def test_a_call_that_may_not_be_repeated_fails(pair: Lab, pool: Callable[..., sky.Compute], place: Spot) -> None:
    compute = pool()
    future = compute.submit(sky.function(stay)(place / "alone", place / "never"), on="node2")
    moved = compute.submit(sky.function(retries=5)(stay)(place / "pinned", place / "never"), on="node2")
    place.wait("alone.node2")
    pair["node2"].cut()
    for one in (future, moved):
        with pytest.raises(sky.HostLost) as raised:
            one.result(170)
        assert raised.value.host == "node2"
    assert compute.submit(sky.function(len)("four"), on="node1").result(10) == 4


def test_when_nobody_answers_the_fault_may_be_here(pair: Lab, pool: Callable[..., sky.Compute], place: Spot) -> None:
    """The pool waits for its lease, says so, and nothing is lost."""
    compute = pool()
    said: list[str] = []
    compute.events.subscribe(lambda event: said.append(str(event)))
    futures = [compute.submit(sky.function(stay)(place / "here", place / "go"), on=f"node{n}") for n in (1, 2)]
    for name in ("node1", "node2"):
        place.wait(f"here.{name}")
    for host in pair.hosts:
        host.cut()
    until(lambda: sum("reconnecting" in line for line in said) == 2, "both are missed")
    place.leave("go")
    until(lambda: any("is your network up?" in line for line in said), "whose fault it may be")
    for host in pair.hosts:
        host.restore()
    assert [future.result(170) for future in futures] == ["node1", "node2"]
    assert not any(": lost" in line for line in said)
