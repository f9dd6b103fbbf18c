"""Parses and validates inventory.toml. Reports all mistakes in it at once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

from skyfab import toml
from skyfab.errors import InventoryError, UsageError
from skyfab.inventory.host import CHECKS, LOCAL, NAME, Address, Host, did_you_mean, kind
from skyfab.inventory.selection import Names, choose, expand, place, split

KEYS = tuple(key for key in CHECKS if key != "name")
_TABLES = ("defaults", "hosts", "groups")
_SSH_KEYS = ("address", "port", "user", "identity", "jump", "host_key")
_RESERVED = ("all", "none", LOCAL.name)
_SPELLING = "letters, digits, '.', '_', '+' and '-', not a sign first"


def read(text: str, source: str) -> tuple[dict[str, Host], dict[str, tuple[str, ...]]]:
    """The hosts and groups of a document. Raises one `InventoryError` with all mistakes."""
    reader = _Reader()
    reader.read(_toml(text, source))
    mistakes = list(dict.fromkeys(reader.mistakes))
    if len(mistakes) > 1:
        raise InventoryError("\n  ".join([f"{source}: {len(mistakes)} mistakes", *map(str, mistakes)]))
    if mistakes:
        raise InventoryError(f"{source}: {mistakes[0].place}: {mistakes[0].problem}", hint=mistakes[0].hint)
    if not reader.hosts:
        raise InventoryError(
            f"{source}: has no hosts", hint='add a table [hosts.node1] and, below it, address = "10.0.0.11"'
        )
    return reader.hosts, reader.groups


def _toml(text: str, source: str) -> dict[str, Any]:
    try:
        return toml.loads(text)
    except ValueError as error:
        raise InventoryError(
            f"{source}: is not TOML: {error}", hint="tables go in [brackets], strings in quotes"
        ) from None
    except RecursionError:
        raise InventoryError(f"{source}: is nested too deeply", hint="three tables are all it needs") from None


@dataclass(frozen=True, slots=True)
class _Mistake:
    place: str
    problem: str
    hint: str | None

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}" + (f" ({self.hint})" if self.hint else "")


@dataclass(slots=True)
class _Reader:
    """Reads a document table by table. Records mistakes and continues."""

    mistakes: list[_Mistake] = field(default_factory=list)
    hosts: dict[str, Host] = field(default_factory=dict)
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    """The table that declares each host."""

    def read(self, document: Mapping[str, Any]) -> None:
        for table in document:
            if table not in _TABLES:
                hint = "move it below [defaults]" if table in KEYS else did_you_mean(table, _TABLES)
                self.note(f"[{_bare(table)}]", "is no table of an inventory", hint or f"there are {', '.join(_TABLES)}")
        defaults = self.keys("[defaults]", self.table("[defaults]", document.get("defaults", {})))
        for name, table in self.table("[hosts]", document.get("hosts", {})).items():
            self.add_hosts(name, table, defaults)
        self.find_twins()
        self.find_jump_circles()
        self.add_groups(self.table("[groups]", document.get("groups", {})))

    def note(self, place: str, problem: str, hint: str | None) -> None:
        self.mistakes.append(_Mistake(place, problem, hint))

    def table(self, place: str, value: object) -> Mapping[str, Any]:
        if isinstance(value, Mapping):
            return value
        self.note(place, f"must be a table, not {kind(value)}", f"write {place} on a line of its own")
        return {}

    def keys(self, place: str, table: Mapping[str, Any]) -> dict[str, Any]:
        """The valid keys of a host's table; the others are recorded as mistakes."""
        values = {}
        for key, value in table.items():
            if key not in KEYS:
                self.note(f"{place} {_bare(key)}", "is no key of a host", _key_hint(place, key, value))
                continue
            try:
                values[key] = CHECKS[key](value)
            except UsageError as error:
                self.note(f"{place} {key}", error.message, error.hint)
        return values

    def add_hosts(self, key: str, value: object, defaults: Mapping[str, Any]) -> None:
        """Adds the host of one table, or several hosts if its name is a range."""
        place = f"[hosts.{_bare(key)}]"
        if not isinstance(value, Mapping):
            self.note(place, f"must be a table, not {kind(value)}", f"write {place} and, below it, address = …")
            return
        names = self.names(place, key)
        addresses = self.addresses(place, value.get("address"), len(names)) if names else []
        values = self.keys(place, {other: item for other, item in value.items() if other != "address"})
        for name, address in zip(names, addresses, strict=True):
            if name in self.hosts:
                self.note(place, f"declares {name} again", f"{self.places[name]} has it")
                continue
            own = values | ({} if address is None else self.keys(place, {"address": address}))
            self.places[name] = place
            self.hosts[name] = self.local(place, own, defaults) if name == LOCAL.name else _host(name, own, defaults)

    def names(self, place: str, key: str) -> list[str]:
        try:
            names = expand(key)
        except UsageError as error:
            self.note(place, error.message, error.hint)
            return []
        if not all(map(NAME.fullmatch, names)):
            self.note(place, "cannot be a host's name", _SPELLING)
        elif names[0] in ("all", "none"):
            self.note(place, f"{names[0]} is a word of its own in selections", "give the host another name")
        else:
            return names
        return []

    def addresses(self, place: str, value: object, count: int) -> list[Any]:
        """One address for each of `count` hosts; ``10.0.0.[11-14]`` is counted in step with their names."""
        try:
            addresses: list[Any] = [*expand(value)] if isinstance(value, str) else [value]
        except UsageError as error:
            self.note(f"{place} address", error.message, error.hint)
            addresses = [None]
        if len(addresses) not in (1, count):
            problem = f"stands for {len(addresses)} addresses, and the name for {count}"
            self.note(f"{place} address", problem, "count both in step")
            addresses = [None]
        return addresses * count if len(addresses) == 1 else addresses

    def local(self, place: str, own: Mapping[str, Any], defaults: Mapping[str, Any]) -> Host:
        for key in own:
            if key in _SSH_KEYS or (key == "transport" and own[key] not in ("auto", "local")):
                self.note(f"{place} {key}", "local is this machine, without SSH", "leave it out, or rename the host")
        own = {key: item for key, item in own.items() if key not in _SSH_KEYS}
        defaults = {key: item for key, item in defaults.items() if key not in _SSH_KEYS}
        return _host(LOCAL.name, {**own, "transport": "local"}, defaults)

    def find_twins(self) -> None:
        """Records hosts that have the same address."""
        first: dict[tuple[str, int, str | None], str] = {}
        alike: dict[str, str] = {}
        for host in self.hosts.values():
            if host.address is None or host.transport == "local":
                continue
            twin, table = first.setdefault(place(host), host.name), self.places[host.name]
            if twin != host.name and table == self.places[twin]:  # one mistake, however many hosts the table has
                alike[table] = host.address
            elif twin != host.name:
                hint = "leave one of them out, or give them different ports"
                self.note(f"{table} address", f"{host.name} has {host.address}, as {twin} has", hint)
        for table, address in alike.items():
            self.note(f"{table} address", f"all its hosts have {address}", "with a range too, as in 10.0.0.[11-14]")

    def find_jump_circles(self) -> None:
        passed = {name: _passed(host) for name, host in self.hosts.items()}
        for name, hops in passed.items():
            for hop in hops:
                if hop == LOCAL.name or (hop in self.hosts and self.hosts[hop].transport == "local"):
                    self.note(f"{self.places[name]} jump", f"{hop} is this machine", "leave the jump out")
        for circle in _circles({name: [hop for hop in hops if hop in self.hosts] for name, hops in passed.items()}):
            hint = 'write jump = "none" for the one that is reached directly'
            self.note(f"{self.places[circle[0]]} jump", f"goes in a circle: {' → '.join(circle)}", hint)

    def add_groups(self, table: Mapping[str, Any]) -> None:
        """Resolves groups, nested ones first."""
        members = {name: self.words(name, value) for name, value in table.items() if self.may_be_group(name)}
        self.groups = dict.fromkeys(members, ())
        inner = {name: [word for word in _mentioned(words) if word in members] for name, words in members.items()}
        for circle in _circles(inner):
            self.note(f"[groups] {_bare(circle[0])}", f"contains itself: {' → '.join(circle)}", "take one of them out")
        names = Names(self.hosts, self.groups)
        for name in TopologicalSorter(inner).static_order():
            try:
                self.groups[name] = tuple(choose(members[name], names))
            except UsageError as error:
                self.note(f"[groups] {_bare(name)}", error.message, error.hint)

    def may_be_group(self, name: str) -> bool:
        place = f"[groups] {_bare(name)}"
        if not NAME.fullmatch(name):
            self.note(place, "cannot be a group's name", _SPELLING)
        elif name in _RESERVED:
            self.note(place, f"{name} is a word of its own in selections", "give the group another name")
        elif name in self.hosts:
            self.note(place, f"a host has that name: {self.places[name]}", "give the group another name")
        else:
            return True
        return False

    def words(self, group: str, value: object) -> list[str]:
        """The valid words of a group; the others are recorded as mistakes."""
        place, words = f"[groups] {_bare(group)}", []
        if not isinstance(value, list):
            self.note(place, f"must be an array, not {kind(value)}", f'for instance {group} = ["node1", "node[2-4]"]')
            return []
        for item in value:
            if not isinstance(item, str):
                self.note(place, f"must have strings in it, not {kind(item)}", "write names in quotes")
                continue
            try:
                _mentioned([item])
                words.append(item)
            except UsageError as error:
                self.note(place, error.message, error.hint)
        return words


def _host(name: str, own: Mapping[str, Any], defaults: Mapping[str, Any]) -> Host:
    """A host with its own values, else the defaults. Environment variables are merged one by one."""
    env = {**defaults.get("env", {}), **own.get("env", {})}
    return Host(**{**defaults, **own, "name": name, "env": env})


def _passed(host: Host) -> list[str]:
    """The names or addresses of a host's jump hosts, without users and ports."""
    hops = [] if host.jump in (None, "none") else str(host.jump).split(",")
    return [address.host for address in map(Address.parse, hops) if address is not None]


def _mentioned(words: list[str]) -> list[str]:
    return [name for word in words for part in split(word) for name in expand(part.removeprefix("!").strip())]


def _circles(graph: dict[str, list[str]]) -> Iterator[list[str]]:
    """Yields each cycle of a graph, and removes it from the graph to find the next."""
    while True:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            circle = error.args[1][::-1]
            graph[circle[0]] = []
            yield circle
        else:
            return


def _key_hint(place: str, key: str, value: object) -> str:
    if isinstance(value, Mapping) and place.startswith("[hosts."):
        part = _bare(key).strip('"')
        return f'if {part} is part of the name, put it in quotes: [hosts."name.{part}"]'
    return did_you_mean(key, KEYS) or f"the keys are {', '.join(KEYS)}"


def _bare(key: str) -> str:
    """A key as TOML spells it: quoted if necessary, and on one line."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=not key.isprintable())
