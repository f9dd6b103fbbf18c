"""Hostfiles of MPI and DeepSpeed: hosts, slots, users, and mistakes with their lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyfab.errors import InventoryError
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory


def read(text: str, folder: Path) -> list[Host]:
    path = folder / "hostfile"
    path.write_text(text)
    return list(Inventory.of(f"hostfile:{path}").hosts.values())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1\nnode2\n", [Host(name="node1"), Host(name="node2")]),
        ("node1 slots=4", [Host(name="node1", slots=4)]),
        ("node1 slots=4 max_slots=8\r\n", [Host(name="node1", slots=4)]),
        ("node1 max-slots = 8 slots = 4", [Host(name="node1", slots=4)]),
        ("node1 cpu=2", [Host(name="node1", slots=2)]),
        ("node1:4", [Host(name="node1", slots=4)]),
        ("node1:4 binding=user:0,3 ifname=ib0", [Host(name="node1", slots=4)]),
        ("ada@node1 slots=2", [Host(name="node1", user="ada", slots=2)]),
        ("node1 user=ada", [Host(name="node1", user="ada")]),
        ("10.0.0.5 slots=2", [Host(name="10.0.0.5", slots=2)]),
        ("# all\n\n  node1 slots=2 # the first\n", [Host(name="node1", slots=2)]),
        ("node1\nnode1\nnode2\nnode1\n", [Host(name="node1", slots=3), Host(name="node2")]),
        ("node1 slots=2\nnode1:3", [Host(name="node1", slots=5)]),
    ],
)
def test_a_line_means_this_host(text: str, expected: list[Host], tmp_path: Path) -> None:
    assert read(text, tmp_path) == expected


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", ": has no hosts", "node1 slots=4"),
        ("# nothing", ": has no hosts", "node1 slots=4"),
        ("node1\nnode2 slots=four", ":2: slots must be a whole number, not 'four'", "node1 slots=4"),
        ("node1 slots=-1", ":1: slots must be a whole number, not '-1'", "node1 slots=4"),
        ("node1 slots=" + "9" * 5000, ":1: slots must be a whole number", "node1 slots=4"),
        ("node1 slots=0", ":1: 'node1': must be between 1 and 4,096", "!name"),
        ("node1 slot=4", ':1: unknown hostfile field "slot"', "did you mean slots?"),
        ("node1 node2", ':1: unknown hostfile field "node2"', ""),
        ("node1:x", ":1: not a host name: 'node1:x'", "node1 slots=4"),
        ("node[1-3]", ":1: 'node[1-3]': not a valid host name", "letters"),
        ("-oProxyCommand slots=1", ":1: '-oProxyCommand': not a valid host name", "letters"),
        ("a;b@node1", ":1: 'node1': not a valid user name: 'a;b'", "letters"),
        ("all slots=1", ":1: 'all': \"all\" is reserved in selections", "rename the host"),
    ],
)
def test_a_mistake_is_reported_with_its_line(text: str, message: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(InventoryError) as caught:
        read(text, tmp_path)
    assert caught.value.message.startswith(f"{tmp_path}/hostfile{message}")
    assert hint in str(caught.value.hint)
