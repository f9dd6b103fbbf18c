"""Which hosts a pool has: the selected ones, and of these the ones that meet its condition. Hosts are this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import skyfab as sky
from skyfab.pool.host_choice import HostChoice
from skyfab.ui.events import Event, Events, Notice


@pytest.fixture
def inventory(home: Path) -> sky.Inventory:
    """Three names of this machine, and one host that nothing listens on."""
    hosts = [
        sky.Host(name=f"here{number}", transport="local", cache=str(home / f"cache{number}")) for number in (1, 2, 3)
    ]
    hosts.append(sky.Host(name="down", address="127.0.0.1", port=1))
    return sky.Inventory(hosts={host.name: host for host in hosts})


def names(hosts: Any) -> list[str]:
    return [host.name for host in hosts]


def choice(hosts: Any, inventory: sky.Inventory | None, **options: Any) -> HostChoice:
    return HostChoice(hosts, inventory, **{"nodes": None, "where": None, **options})


def chosen(made: HostChoice) -> tuple[list[str], list[str]]:
    """The names of the chosen hosts, and what the user is told."""
    events, seen = Events(), list[Event]()
    events.subscribe(seen.append)
    try:
        return names(made.choose(events)), [f"{event.host}: {event.text}" for event in seen if type(event) is Notice]
    finally:
        made.release()


def test_hosts_are_those_that_are_selected(inventory: sky.Inventory) -> None:
    for hosts in (["here2", "here1"], (name for name in ("here2", "here1")), "here2,here1"):
        made = choice(hosts, inventory)
        assert names(made.listed) == ["here2", "here1"]
        assert made.inventory is inventory
        assert chosen(made) == (["here2", "here1"], [])
    assert names(choice(inventory.hosts["here3"], inventory).listed) == ["here3"]
    assert names(choice(None, inventory).listed) == ["here1", "here2", "here3", "down"]
    assert names(choice(None, inventory, nodes=2).listed) == ["here1", "here2"]


def test_the_first_that_meet_a_condition_are_chosen_of_all(inventory: sky.Inventory) -> None:
    made = choice(["down", "here1", "here2", "here3"], inventory, nodes=2, where="cpus")
    assert len(made.listed) == 4, "any of them may meet it"
    assert chosen(made) == (["here1", "here2"], ["down: excluded by 'cpus'"])
    assert chosen(choice(["here1", "here3"], inventory, where="cpus >= 1")) == (["here1", "here3"], [])


def test_too_few_hosts_meet_a_condition(inventory: sky.Inventory) -> None:
    with pytest.raises(sky.UsageError) as caught:
        chosen(choice(["here1", "down"], inventory, nodes=2, where="cpus"))
    first, second = caught.value.message.splitlines()
    assert first == "only 1 of 2 hosts meet 'cpus', but nodes=2"
    assert second.startswith("  down: ")
    with pytest.raises(sky.UsageError) as caught:
        chosen(choice(["here1", "here2"], inventory, where="cpus > 100000"))
    first, *others = caught.value.message.splitlines()
    assert first == "no host meets 'cpus > 100000'"
    assert [line.partition(": cpus ")[0] for line in others] == ["  here1", "  here2"]
