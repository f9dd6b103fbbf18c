"""Parses and validates inventory.toml, and tables like it from other sources. Reports all mistakes together."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from skyfab._util import schema, toml
from skyfab._util.sizes import counted
from skyfab._util.suggest import did_you_mean
from skyfab.errors import InventoryError, UsageError
from skyfab.inventory.host import CHECKS, LOCAL, NAME, Host
from skyfab.inventory.selection import Names, choose, expand, split
from skyfab.inventory.source import Contents, Mistakes, Source, read_text

_CHECKS = {key: check for key, check in CHECKS.items() if key != "name"}
KEYS = tuple(_CHECKS)
_TABLES = ("defaults", "hosts", "groups")
_SSH_KEYS = ("address", "port", "user", "identity", "jump", "host_key")
RESERVED = ("all", "none", LOCAL.name)
SPELLING = "use letters, digits, '.', '_', '+' and '-', and start with a letter or digit"


Place = tuple[str, ...]
"""The path of a table or key, as in ``("hosts", "node1", "port")``."""


def read(text: str, source: str) -> Contents:
    """The hosts and groups of a document. Raises one `InventoryError` with all mistakes."""
    try:
        tables = toml.loads(text)
    except (ValueError, RecursionError) as error:
        hint = "put tables in [brackets], strings in quotes"
        raise InventoryError(f"{source}: not valid TOML: {error}", hint=hint) from None
    contents = read_tables(tables, Mistakes(source), lambda place: ": ".join(filter(None, [source, _shown(place)])))
    if not contents.hosts:
        raise InventoryError(
            f"{source}: has no hosts", hint='add a table [hosts.node1] and, below it, address = "10.0.0.11"'
        )
    return contents


def read_tables(tables: Mapping[str, Any], mistakes: Mistakes, where: Callable[[Place], str]) -> Contents:
    """The hosts and groups of the tables of a document; `where` says where a table or key is.

    Raises one `InventoryError` with all mistakes, those that were noted before among them.
    """
    reader = _Reader(lambda place, problem, hint: mistakes.note(where(place), problem, hint))
    reader.read(tables)
    mistakes.check()
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
    """Reads a document table by table. Records mistakes and continues."""

    note: Callable[[Place, str, str | None], None]
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
                self.note((table,), f"unknown {what}", hint or f"known tables: {', '.join(_TABLES)}")
        defaults = self.keys(("defaults",), self.table(("defaults",), document.get("defaults", {})))
        for name, table in self.table(("hosts",), document.get("hosts", {})).items():
            self.add_hosts(name, table, defaults)
        self.add_groups(self.table(("groups",), document.get("groups", {})))

    def table(self, place: Place, value: object) -> Mapping[str, Any]:
        if isinstance(value, Mapping):
            return value
        self.note(place, f"must be a table, not {schema.name_of(value)}", f"write {_shown(place)} on its own line")
        return {}

    def keys(self, place: Place, table: Mapping[str, Any]) -> dict[str, Any]:
        """The valid keys of a host's table; the others are recorded as mistakes."""
        values, mistakes = schema.parse_table(table, _CHECKS)
        for key, problem, hint in mistakes:
            self.note((*place, key), problem, hint if key in KEYS else _key_hint(place, key, table[key]))
        return values

    def add_hosts(self, key: str, value: object, defaults: Mapping[str, Any]) -> None:
        """Adds the host of one table, or several hosts if its name is a range."""
        place = ("hosts", key)
        table = self.table(place, value)
        names = self.names(place, key)
        addresses = self.addresses(place, table.get("address"), len(names)) if names else []
        values = self.keys(place, {other: item for other, item in table.items() if other != "address"})
        for name, address in zip(names, addresses, strict=True):
            if name in self.hosts:
                self.note(place, f"defines {name} again", f"it is already in {_shown(self.places[name])}")
                continue
            if name == LOCAL.name and address is not None:
                self.note((*place, "address"), f"{name} is this machine, without SSH", "rename the host")
            own = values | ({} if address is None else self.keys(place, {"address": address}))
            self.places[name] = place
            self.hosts[name] = _host(name, own, defaults)

    def names(self, place: Place, key: str) -> list[str]:
        try:
            names = expand(key)
        except UsageError as error:
            self.note(place, error.message, error.hint)
            return []
        if not all(map(NAME.fullmatch, names)):
            self.note(place, "not a valid host name", SPELLING)
        elif names[0] in ("all", "none"):
            self.note(place, f'"{names[0]}" is reserved in selections', "rename the host")
        else:
            return names
        return []

    def addresses(self, place: Place, value: object, count: int) -> list[Any]:
        """One address for each of `count` hosts; ``10.0.0.[11-14]`` is counted in step with their names."""
        try:
            addresses: list[Any] = [*expand(value)] if isinstance(value, str) else [value]
        except UsageError as error:
            self.note((*place, "address"), error.message, error.hint)
            addresses = [None]
        if len(addresses) not in (1, count):
            problem = f"the name expands to {counted(count, 'host')}, the address to {len(addresses)}"
            self.note((*place, "address"), problem, "use ranges of the same length")
            addresses = [None]
        return addresses * count if len(addresses) == 1 else addresses

    def add_groups(self, table: Mapping[str, Any]) -> None:
        """Resolves groups, nested ones first."""
        self.groups = {name: () for name in table if self.may_be_group(name)}
        words: dict[str, list[str]] = {}
        inner: dict[str, list[str]] = {}
        for name in self.groups:
            try:
                words[name] = schema.parse(list[str], table[name])
                parts = [part.removeprefix("!").strip() for word in words[name] for part in split(word)]
                inner[name] = [one for part in parts for one in expand(part) if one in self.groups]
            except schema.Invalid as error:
                self.note(("groups", name), str(error), f'for instance {name} = ["node1", "node[2-4]"]')
            except UsageError as error:
                self.note(("groups", name), error.message, error.hint)
        names = Names(self.hosts, self.groups)
        try:
            order = [*filter(inner.__contains__, TopologicalSorter(inner).static_order())]
        except CycleError as error:
            circle = error.args[1][::-1]
            self.note(("groups", circle[0]), f"contains itself: {' → '.join(circle)}", "remove one of them")
            return
        for name in order:
            try:
                self.groups[name] = tuple(choose(words[name], names))
            except UsageError as error:
                self.note(("groups", name), error.message, error.hint)

    def may_be_group(self, name: str) -> bool:
        place = ("groups", name)
        if not NAME.fullmatch(name):
            self.note(place, "not a valid group name", SPELLING)
        elif name in RESERVED:
            self.note(place, f'"{name}" is reserved in selections', "rename the group")
        elif name in self.hosts:
            self.note(place, f"a host has that name: {_shown(self.places[name])}", "rename the group")
        else:
            return True
        return False


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


def _matches(path: Path, text: str) -> bool:
    """Whether it is an inventory.toml, also one with mistakes."""
    if path.suffix == ".toml" or path.is_dir():
        return path.suffix == ".toml"
    lines = [line for line in map(str.strip, text.splitlines()) if line and line[0] not in "#;"]
    if (not lines and not path.suffix) or any(re.match(r"\[\s*hosts\s*\.|\[\s*defaults\s*\]", line) for line in lines):
        return True
    try:
        return not set(_TABLES).isdisjoint(toml.loads(text))
    except ValueError:
        return False


SOURCE = Source(word="toml", takes="path", read=lambda path: read(read_text(path), path), matches=_matches)
