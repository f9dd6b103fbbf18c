"""Builds an inventory from hosts and groups of another source, with the same checks as for inventory.toml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyfab.errors import InventoryError
from skyfab.inventory.file import SPELLING, Place, read_tables
from skyfab.inventory.host import NAME
from skyfab.inventory.source import Contents


class Listing:
    """Collects hosts, groups and skipped names of one source."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.left_out: dict[str, str] = {}
        """What was skipped, by name, with the reason."""
        self._hosts: dict[str, dict[str, Any]] = {}
        self._groups: dict[str, list[str]] = {}
        self._at: dict[Place, str] = {}

    def __contains__(self, name: object) -> bool:
        """Whether there is a host of that name."""
        return name in self._hosts

    def add(self, name: str, at: str, keys: Mapping[str, Any], places: Mapping[str, str] | None = None) -> None:
        """Adds a host with the keys of its table; `at` and `places` say where it and its keys are, for messages."""
        if not NAME.fullmatch(name):
            raise InventoryError(f"{at}: {name!r}: not a valid host name", hint=SPELLING)
        self._hosts[name] = dict(keys)
        self._at["hosts", name] = f"{at}: {name!r}"
        for key, place in (places or {}).items():
            self._at["hosts", name, key] = place

    def add_group(self, name: str, at: str, words: Sequence[str]) -> None:
        """Adds a group of hosts and groups."""
        self._groups[name] = list(words)
        self._at["groups", name] = f"{at}: group {name!r}"

    def read(self, hint: str) -> Contents:
        """The hosts and groups. Raises InventoryError, with `hint` where there is no host."""

        def where(place: Place) -> str:
            return next(self._at[place[:size]] for size in range(len(place), 0, -1) if place[:size] in self._at)

        contents = read_tables({"hosts": self._hosts, "groups": self._groups}, where)
        if not contents.hosts:
            why = "".join(f"; skipped {name}: {reason}" for name, reason in list(self.left_out.items())[:3])
            raise InventoryError(f"{self.source}: has no hosts{why}", hint=hint)
        return contents._replace(left_out=self.left_out)
