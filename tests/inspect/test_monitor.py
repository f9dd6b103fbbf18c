"""The monitor of `skyfab top`, with this machine as its hosts: what it knows, what it survives, what it leaves."""

from __future__ import annotations

from pathlib import Path

from stage.spot import until

from skyfab.errors import Unreachable
from skyfab.inspect.top.monitor import Monitor, Seen
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory


def hosts(folder: Path) -> list[Host]:
    """One that works, and one that refuses connections."""
    dead = Host(name="dead", address="127.0.0.1", port=1, user="root")
    return [Host(name="here", transport="local", cache=str(folder / "cache")), dead]


def test_hosts_are_looked_at_again_and_one_that_is_lost_delays_no_other(tmp_path: Path) -> None:
    chosen = hosts(tmp_path)
    with Monitor(chosen, Inventory(hosts={host.name: host for host in chosen}), every=0.1) as watched:
        until(lambda: watched.seen()[0].survey and watched.seen()[1].error)
        here, dead = watched.seen()
        assert isinstance(dead.error, Unreachable) and dead.heard is None
        until(lambda: later(watched.seen()[0], here))
    assert watched.seen()[0].error is None, "closing it is not a failure"


def later(one: Seen, other: Seen) -> bool:
    return one.heard is not None and other.heard is not None and one.heard > other.heard
