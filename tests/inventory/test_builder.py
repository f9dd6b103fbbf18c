"""Hosts and groups of other sources: the same checks as for inventory.toml, and messages that say where."""

from __future__ import annotations

import pytest

from skyfab.errors import InventoryError
from skyfab.inventory.builder import Listing
from skyfab.inventory.host import Host


def test_hosts_and_groups() -> None:
    listing = Listing("list")
    listing.add("node1", "list:1", {"port": 2222})
    listing.add("node2", "list:2", {})
    listing.add_group("gpu", "list:3", ["node2", "node1"])
    listing.left_out["node3"] = "not SSH"
    assert "node1" in listing
    assert "node3" not in listing
    found = listing.read("no hint")
    assert found.hosts == {"node1": Host(name="node1", port=2222), "node2": Host(name="node2")}
    assert (found.groups, found.left_out) == ({"gpu": ("node2", "node1")}, {"node3": "not SSH"})


def test_all_mistakes_with_their_places() -> None:
    listing = Listing("list")
    listing.add("node 1", "list:1", {})
    listing.add("node2", "list:2", {"port": 0, "user": "-x"}, {"port": "list:3: the port"})
    listing.add_group("node2", "list:4", [])
    with pytest.raises(InventoryError) as caught:
        listing.read("no hint")
    first, *rest = caught.value.message.splitlines()
    assert first == "list: 4 mistakes"
    for line, shown in zip(
        rest,
        (
            "list:1: 'node 1': not a valid host name",
            "list:3: the port: must be from 1 to 65535",
            "list:2: 'node2': must not start with '-'",
            "list:4: group 'node2': a host has that name",
        ),
        strict=True,
    ):
        assert line.strip().startswith(shown)


def test_a_source_without_hosts_says_what_was_skipped() -> None:
    listing = Listing("list")
    listing.left_out |= {f"node{number}": "not SSH" for number in range(1, 6)}
    with pytest.raises(InventoryError) as caught:
        listing.read("add one")
    skipped = "; ".join(f"skipped node{number}: not SSH" for number in range(1, 4))
    assert caught.value.message == f"list: has no hosts; {skipped}"
    assert caught.value.hint == "add one"
