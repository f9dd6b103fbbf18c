"""Parses and validates inventory.toml, and such tables from other sources. Reports all mistakes at once."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from skyfab._util import schema, toml
from skyfab._util.sizes import counted
from skyfab._util.suggest import did_you_mean
from skyfab.errors import InventoryError, UsageError
from skyfab.inventory.host import CHECKS, LOCAL, NAME, Address, Host
from skyfab.inventory.selection import Names, choose, expand, place, split
from skyfab.inventory.source import Contents, Mistakes, Source
from skyfab.inventory.text import read_text
from skyfab.inventory.toml_lines import lines_by_key

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
    tables = _toml(text, source)
    mistakes = Mistakes(source)
    lines = functools.cache(lambda: lines_by_key(text))

    def where(place: Place) -> str:
        known = (lines().get(place[:size]) for size in range(len(place), 0, -1))
        line = next((f":{number}" for number in known if number), "")
        return ": ".join(filter(None, [f"{source}{line}", _shown(place)]))

    contents = read_tables(tables, mistakes, where)
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


def _toml(text: str, source: str) -> dict[str, Any]:
    try:
        return toml.loads(text)
    except ValueError as error:
        twice = re.sub(r"^Cannot (?:declare|overwrite) \((.*?),?\) twice", _defined_twice, str(error))
        problem = twice if twice != str(error) else f"not valid TOML: {error}"
        raise InventoryError(f"{source}: {problem}", hint="put tables in [brackets], strings in quotes") from None


def _defined_twice(match: re.Match[str]) -> str:
    """tomllib names a table as a tuple of its names."""
    names = re.findall("'([^']*)'", match[1])
    return f"[{'.'.join(map(bare, names))}] is defined twice"


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
        defaults = self.keys(("defaults",), self.table(document, "defaults"))
        for name, table in self.table(document, "hosts").items():
            self.add_hosts(name, table, defaults)
        self.find_twins()
        self.find_jump_circles()
        self.add_groups(self.table(document, "groups"))

    def table(self, document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        value = document.get(name, {})
        if isinstance(value, Mapping):
            return value
        self.note((name,), f"must be a table, not {schema.name_of(value)}", f"write [{name}] on a line of its own")
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
        if not isinstance(value, Mapping):
            self.note(
                place,
                f"must be a table, not {schema.name_of(value)}",
                f"write {_shown(place)} and, below it, address = …",
            )
            return
        names = self.names(place, key)
        addresses = self.addresses(place, value.get("address"), len(names)) if names else []
        values = self.keys(place, {other: item for other, item in value.items() if other != "address"})
        for name, address in zip(names, addresses, strict=True):
            if name in self.hosts:
                self.note(place, f"defines {name} again", f"it is already in {_shown(self.places[name])}")
                continue
            own = values | ({} if address is None else self.keys(place, {"address": address}))
            self.places[name] = place
            self.hosts[name] = self.local(place, own, defaults) if name == LOCAL.name else _host(name, own, defaults)

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

    def local(self, place: Place, own: Mapping[str, Any], defaults: Mapping[str, Any]) -> Host:
        for key in own:
            if key in _SSH_KEYS or (key == "transport" and own[key] not in ("auto", "local")):
                self.note((*place, key), '"local" is this machine, without SSH', "remove the key, or rename the host")
        own = {key: item for key, item in own.items() if key not in _SSH_KEYS}
        defaults = {key: item for key, item in defaults.items() if key not in _SSH_KEYS}
        return _host(LOCAL.name, {**own, "transport": "local"}, defaults)

    def find_twins(self) -> None:
        """Records hosts that have the same address."""
        first: dict[tuple[str, int, str | None], str] = {}
        alike: dict[Place, str] = {}
        for host in self.hosts.values():
            if host.address is None or host.transport == "local":
                continue
            twin, table = first.setdefault(place(host), host.name), self.places[host.name]
            if twin != host.name and table == self.places[twin]:  # one mistake, however many hosts the table has
                alike[table] = host.address
            elif twin != host.name:
                hint = "remove one of them, or give them different ports"
                self.note((*table, "address"), f"{host.name} has the same address as {twin}: {host.address}", hint)
        for table, address in alike.items():
            hint = "use a range, as in 10.0.0.[11-14]"
            self.note((*table, "address"), f"all hosts of the range have the same address: {address}", hint)

    def find_jump_circles(self) -> None:
        passed = {name: _passed(host) for name, host in self.hosts.items()}
        for name, hops in passed.items():
            for hop in hops:
                if hop == LOCAL.name or (hop in self.hosts and self.hosts[hop].transport == "local"):
                    self.note((*self.places[name], "jump"), f"{hop} is this machine", "remove the jump")
        for circle in _circles({name: [hop for hop in hops if hop in self.hosts] for name, hops in passed.items()}):
            hint = 'write jump = "none" for the one that is reached directly'
            self.note((*self.places[circle[0]], "jump"), f"jump hosts form a loop: {' → '.join(circle)}", hint)

    def add_groups(self, table: Mapping[str, Any]) -> None:
        """Resolves groups, nested ones first."""
        members = {name: self.words(name, value) for name, value in table.items() if self.may_be_group(name)}
        self.groups = dict.fromkeys(members, ())
        inner = {name: [word for word in _mentioned(words) if word in members] for name, words in members.items()}
        for circle in _circles(inner):
            self.note(("groups", circle[0]), f"contains itself: {' → '.join(circle)}", "remove one of them")
        names = Names(self.hosts, self.groups)
        for name in TopologicalSorter(inner).static_order():
            try:
                self.groups[name] = tuple(choose(members[name], names))
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

    def words(self, group: str, value: object) -> list[str]:
        """The valid words of a group; the others are recorded as mistakes."""
        place, words = ("groups", group), []
        if not isinstance(value, list):
            self.note(
                place,
                f"must be an array, not {schema.name_of(value)}",
                f'for instance {group} = ["node1", "node[2-4]"]',
            )
            return []
        for item in value:
            if not isinstance(item, str):
                self.note(place, f"must contain strings, not {schema.name_of(item)}", "write names in quotes")
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
