"""Reads hostfiles of MPI and DeepSpeed: a host on each line, with its slots."""

from __future__ import annotations

import re
from typing import Any, Final

from skyfab._util.suggest import did_you_mean
from skyfab.errors import InventoryError
from skyfab.inventory.builder import Listing
from skyfab.inventory.source import Contents, Source, lines_of, read_text

_HOST: Final = re.compile(r"(?:(?P<user>[^@\s]+)@)?(?P<name>[^@:\s=]+)(?::(?P<slots>[0-9]{1,9}))?")
_SLOTS: Final = ("slots", "count", "cpu")
_USERS: Final = ("user", "username", "user_name", "user-name")
_UNUSED: Final = (
    *("max_slots", "max-slots", "slots_max", "slots-max", "cpu_max", "cpu-max", "count_max", "count-max"),
    *("boards", "sockets", "sockets_per_board", "cores", "cores_per_socket", "rank", "port", "binding", "ifname"),
)
"""Keys that some implementation of MPI has, and that have no meaning here."""
HINT: Final = "a line is a host and its slots: node1 slots=4, or node1:4"


def read(text: str, source: str) -> Contents:
    """The hosts of a hostfile; one that is on several lines has the slots of all.

    Slots are processes on a host, so they are the host's `slots`: solo calls that run at once. Broadcasts have one rank
    for each GPU, whatever the slots are. Raises InventoryError.
    """
    listing = Listing(source)
    hosts: dict[str, tuple[str, int, dict[str, Any]]] = {}
    for number, line in enumerate(lines_of(text), 1):
        words = re.sub(r"[ \t]*=[ \t]*", "=", line.partition("#")[0]).split()
        if not words:
            continue
        at = f"{source}:{number}"
        match = _HOST.fullmatch(words[0])
        if match is None:
            raise InventoryError(f"{at}: not a host name: {words[0]!r}", hint=HINT)
        keys = _keys(words[1:], at)
        slots = int(keys.pop("slots", match["slots"] or 1))
        user = {"user": match["user"]} if match["user"] else {}
        first, more, others = hosts.get(match["name"], (at, 0, {}))
        hosts[match["name"]] = first, more + slots, others | keys | user
    for name, (at, slots, keys) in hosts.items():
        listing.add(name, at, keys | {"slots": slots})
    return listing.read(HINT)


def _keys(words: list[str], at: str) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name in _SLOTS and re.fullmatch("[0-9]{1,9}", value):
            keys["slots"] = int(value)
        elif equals and name in _SLOTS:
            raise InventoryError(f"{at}: {name} must be a whole number, not {value!r}", hint=HINT)
        elif equals and name in _USERS:
            keys["user"] = value
        elif not equals or name not in _UNUSED:
            hint = did_you_mean(name, (*_SLOTS, *_USERS, *_UNUSED))
            raise InventoryError(f'{at}: unknown hostfile field "{name}"', hint=hint or HINT)
    return keys


SOURCE = Source(word="hostfile", takes="path", read=lambda path: read(read_text(path), path))
