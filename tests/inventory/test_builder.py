"""Hosts and groups of other sources: the same checks as for inventory.toml, and messages that say where."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("node2", {"port": 0}, "list:3: the port: must be from 1 to 65535"),
        ("node2", {"user": "-x"}, "list:1: 'node2': must not start with '-'"),
        ("group", {}, "list:4: group 'group': a host has that name"),
    ],
)
def test_a_mistake_has_its_place(name: str, keys: dict[str, Any], message: str) -> None:
    listing = Listing("list")
    listing.add_group("group", "list:4", [])
    with pytest.raises(InventoryError, match="list:1: 'node 1': not a valid host name"):
        listing.add("node 1", "list:1", {})
    listing.add(name, "list:1", keys, {"port": "list:3: the port"})
    with pytest.raises(InventoryError) as caught:
        listing.read("no hint")
    assert caught.value.message.startswith(message)


def test_a_source_without_hosts_says_what_was_skipped() -> None:
    listing = Listing("list")
    listing.left_out |= {f"node{number}": "not SSH" for number in range(1, 6)}
    with pytest.raises(InventoryError) as caught:
        listing.read("add one")
    skipped = "; ".join(f"skipped node{number}: not SSH" for number in range(1, 4))
    assert caught.value.message == f"list: has no hosts; {skipped}"
    assert caught.value.hint == "add one"
