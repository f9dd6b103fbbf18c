"""Parses and validates inventory.toml, and tables like it from other sources."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

from skyfab._util import schema, toml
from skyfab._util.sizes import counted
from skyfab._util.suggest import did_you_mean
from skyfab.errors import InventoryError, UsageError
from skyfab.inventory.host import CHECKS, LOCAL, NAME, Host
from skyfab.inventory.selection import Names, choose, expand, split
from skyfab.inventory.source import Contents, Source, read_text

_CHECKS = {key: check for key, check in CHECKS.items() if key != "name"}
KEYS = tuple(_CHECKS)
_TABLES = ("defaults", "hosts", "groups")
_SSH_KEYS = ("address", "port", "user", "identity", "jump", "host_key")
RESERVED = ("all", "none", LOCAL.name)
SPELLING = "use letters, digits, '.', '_', '+' and '-', and start with a letter or digit"


Place = tuple[str, ...]
"""The path of a table or key, as in ``("hosts", "node1", "port")``."""


def read(text: str, source: str) -> Contents:
    """The hosts and groups of a document. Raises InventoryError."""
    try:
        tables = toml.loads(text)
    except (ValueError, RecursionError) as error:
        hint = "put tables in [brackets], strings in quotes"
        raise InventoryError(f"{source}: not valid TOML: {error}", hint=hint) from None
    contents = read_tables(tables, lambda place: ": ".join(filter(None, [source, _shown(place)])))
    if not contents.hosts:
        raise InventoryError(
            f"{source}: has no hosts", hint='add a table [hosts.node1] and, below it, address = "10.0.0.11"'
        )
    return contents


def read_tables(tables: Mapping[str, Any], where: Callable[[Place], str]) -> Contents:
    """The hosts and groups of the tables of a document; `where` says where a table or key is. Raises InventoryError."""
    reader = _Reader(where)
    reader.read(tables)
    return Contents(reader.hosts, reader.groups, {})


def _shown(place: Place) -> str:
    """A path as messages name it: ``[hosts.node1] port``. Unknown tables and keys are left to the message."""
    if place[0] not in _TABLES:
        return ""
    size = 2 if place[0] == "hosts" else 1
    names = [bare(name) for name in place[size:] if name in KEYS or place[0] == "groups"]
    return " ".join([f"[{'.'.join(map(bare, place[:size]))}]", *names])


@dataclass(slots=True)
class _Reader:
    """Reads a document table by table."""

    where: Callable[[Place], str]
    hosts: dict[str, Host] = field(default_factory=dict)
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    """The table that declares each host."""

    def read(self, document: Mapping[str, Any]) -> None:
        for table in document:
            if table not in _TABLES:
                hint = "move it below [defaults]" if table in KEYS else did_you_mean(table, _TABLES)
                what = (
                    f"table [{bare(table)}]" if isinstance(document[table], Mapping) else f"key {schema.quoted(table)}"
                )
                raise self.error((table,), f"unknown {what}", hint or f"known tables: {', '.join(_TABLES)}")
        defaults = self.keys(("defaults",), self.table(("defaults",), document.get("defaults", {})))
        for name, table in self.table(("hosts",), document.get("hosts", {})).items():
            self.add_hosts(name, table, defaults)
        self.add_groups(self.table(("groups",), document.get("groups", {})))

    def error(self, place: Place, problem: str, hint: str | None) -> InventoryError:
        return InventoryError(f"{self.where(place)}: {problem}", hint=hint)

    @contextmanager
    def at(self, place: Place) -> Iterator[None]:
        """An error of a name, range or selection in the block is one of this place."""
        try:
            yield
        except UsageError as error:
            raise self.error(place, error.message, error.hint) from None

    def table(self, place: Place, value: object) -> Mapping[str, Any]:
        if isinstance(value, Mapping):
            return value
        what = f"must be a table, not {schema.name_of(value)}"
        raise self.error(place, what, f"write {_shown(place)} on its own line")

    def keys(self, place: Place, table: Mapping[str, Any]) -> dict[str, Any]:
        """The checked keys of a host's table."""
        try:
            return schema.parse_table(table, _CHECKS)
        except schema.Mistake as error:
            hint = error.hint if error.key in KEYS else _key_hint(place, error.key, table[error.key])
            raise self.error((*place, error.key), error.problem, hint) from None

    def add_hosts(self, key: str, value: object, defaults: Mapping[str, Any]) -> None:
        """Adds the host of one table, or several hosts if its name is a range."""
        place = ("hosts", key)
        table = self.table(place, value)
        with self.at(place):
            names = expand(key)
        if not all(map(NAME.fullmatch, names)):
            raise self.error(place, "not a valid host name", SPELLING)
        if names[0] in ("all", "none"):
            raise self.error(place, f'"{names[0]}" is reserved in selections', "rename the host")
        addresses = self.addresses((*place, "address"), table.get("address"), len(names))
        values = self.keys(place, {other: item for other, item in table.items() if other != "address"})
        for name, address in zip(names, addresses, strict=True):
            if name in self.hosts:
                raise self.error(place, f"defines {name} again", f"it is already in {_shown(self.places[name])}")
            if name == LOCAL.name and address is not None:
                raise self.error((*place, "address"), f"{name} is this machine, without SSH", "rename the host")
            own = values | ({} if address is None else self.keys(place, {"address": address}))
            self.places[name] = place
            self.hosts[name] = _host(name, own, defaults)

    def addresses(self, place: Place, value: object, count: int) -> list[Any]:
        """One address for each of `count` hosts; ``10.0.0.[11-14]`` is counted in step with their names."""
        with self.at(place):
            addresses: list[Any] = [*expand(value)] if isinstance(value, str) else [value]
        if len(addresses) not in (1, count):
            problem = f"the name expands to {counted(count, 'host')}, the address to {len(addresses)}"
            raise self.error(place, problem, "use ranges of the same length")
        return addresses * count if len(addresses) == 1 else addresses

    def add_groups(self, table: Mapping[str, Any]) -> None:
        """Resolves groups, nested ones first."""
        for name in table:
            self.check_group(name)
        self.groups = dict.fromkeys(table, ())
        words: dict[str, list[str]] = {}
        inner: dict[str, list[str]] = {}
        for name in table:
            try:
                words[name] = schema.parse(list[str], table[name])
            except schema.Invalid as error:
                hint = f'for instance {name} = ["node1", "node[2-4]"]'
                raise self.error(("groups", name), str(error), hint) from None
            with self.at(("groups", name)):
                parts = [part.removeprefix("!").strip() for word in words[name] for part in split(word)]
                inner[name] = [one for part in parts for one in expand(part) if one in self.groups]
        try:
            order = [*TopologicalSorter(inner).static_order()]
        except CycleError as error:
            circle = error.args[1][::-1]
            what = f"contains itself: {' → '.join(circle)}"
            raise self.error(("groups", circle[0]), what, "remove one of them") from None
        names = Names(self.hosts, self.groups)
        for name in order:
            with self.at(("groups", name)):
                self.groups[name] = tuple(choose(words[name], names))

    def check_group(self, name: str) -> None:
        place = ("groups", name)
        if not NAME.fullmatch(name):
            raise self.error(place, "not a valid group name", SPELLING)
        if name in RESERVED:
            raise self.error(place, f'"{name}" is reserved in selections', "rename the group")
        if name in self.hosts:
            raise self.error(place, f"a host has that name: {_shown(self.places[name])}", "rename the group")


def _host(name: str, own: Mapping[str, Any], defaults: Mapping[str, Any]) -> Host:
    """A host with its own values, else the defaults. Environment variables are merged one by one."""
    env = {**defaults.get("env", {}), **own.get("env", {})}
    given = {**defaults, **own, "name": name, "env": env}
    if name == LOCAL.name:
        given = {key: item for key, item in given.items() if key not in _SSH_KEYS} | {"transport": "local"}
    return Host(**given)


def _key_hint(place: Place, key: str, value: object) -> str:
    if isinstance(value, Mapping) and place[0] == "hosts":
        part = bare(key).strip('"')
        return f'if {part} is part of the name, put it in quotes: [hosts."name.{part}"]'
    return did_you_mean(key, KEYS) or f"known keys: {', '.join(KEYS)}"


def bare(key: str) -> str:
    """A key as TOML spells it: quoted if necessary, and on one line."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else schema.quoted(key)


SOURCE = Source(word="toml", takes="path", read=lambda path: read(read_text(path), path))
