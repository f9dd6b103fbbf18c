"""Hosts and groups of an Ansible inventory, and how each host is reached: variables, by Ansible's precedence."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final, NamedTuple

from skyfab.errors import InventoryError, UsageError
from skyfab.inventory.builder import Listing
from skyfab.inventory.file import RESERVED, Contents
from skyfab.inventory.selection import MOST

_KEYS: Final = {
    "address": ("ansible_host", "ansible_ssh_host"),
    "port": ("ansible_port", "ansible_ssh_port"),
    "user": ("ansible_user", "ansible_ssh_user"),
    "identity": ("ansible_private_key_file", "ansible_ssh_private_key_file"),
}
"""Keys of a host with the variables that set them; of several, the last one counts."""
_ARGS: Final = ("ansible_ssh_common_args", "ansible_ssh_extra_args")
_CONNECTION: Final = "ansible_connection"
_PRIORITY: Final = "ansible_group_priority"
VARIABLES: Final = frozenset({*itertools.chain(*_KEYS.values()), *_ARGS, _CONNECTION, _PRIORITY})
"""The variables that are read. Others, secrets among them, are not looked at."""
_SSH: Final = ("ssh", "smart", "paramiko", "paramiko_ssh", "ansible.builtin.ssh", "ansible.builtin.paramiko_ssh")
_LOCAL: Final = ("local", "ansible.builtin.local")
_IMPLIED: Final = ("all", "ungrouped")
"""Groups that Ansible has of itself."""
_MOST_STEPS: Final = 1_000_000
"""Members of groups that are looked at."""
_RANGE: Final = re.compile(r"\[([0-9]{1,9}|[A-Za-z]):([0-9]{1,9}|[A-Za-z])(?::([0-9]{1,9}))?\]")
_PLAIN_COMMAND: Final = re.compile(
    r"ssh((?: +(?:-q|-W +%h:%p|-p +[0-9]+|-l +[^ -][^ ]*))*) +([^ -][^ ]*)((?: +(?:-q|-W +%h:%p))*)"
)


class Value(NamedTuple):
    """A variable's text, and the file and line that set it."""

    text: str
    at: str


Variables = dict[str, Value]


@dataclass(slots=True)
class Group:
    """A group as the inventory has it."""

    name: str
    at: str
    hosts: dict[str, None] = field(default_factory=dict)
    children: dict[str, None] = field(default_factory=dict)
    variables: Variables = field(default_factory=dict)
    more: Variables = field(default_factory=dict)
    """Those of its file in group_vars."""


class Tree:
    """All that was read: groups, hosts, and what is wrong with them."""

    def __init__(self, source: str) -> None:
        self.listing = Listing(source)
        self.note = self.listing.mistakes.note
        self.groups = {name: Group(name, source) for name in _IMPLIED}
        self.hosts: dict[str, str] = {}
        """Where each host is first."""
        self.variables: dict[str, Variables] = {}
        """Those of each host's own."""
        self._steps = 0

    def group(self, name: str, at: str) -> Group:
        """The group of that name, made if it is new."""
        return self.groups.setdefault(name, Group(name, at))

    def add_hosts(self, word: str, at: str, group: Group, variables: Mapping[str, Value], port: str = "") -> None:
        """Adds a host to a group, or several if its name is a range; `port` counts for those that are new."""
        try:
            names = expand(word)
        except UsageError as error:
            self.note(at, error.message, error.hint)
            return
        for name in self._counted(names):
            if name not in self.hosts:
                self.hosts[name] = at
                self.variables[name] = {"ansible_port": Value(port, at)} if port else {}
            group.hosts[name] = None
            self.variables[name].update(variables)
        self.listing.limit(len(self.hosts))

    def read(self) -> Contents:
        """The hosts and groups. Raises one `InventoryError` with all mistakes."""
        merged = self._merged()
        for name, at in self.hosts.items():
            self._add(name, at, merged[name])
        for group in self.groups.values():
            if group.name in RESERVED and group.name not in _IMPLIED:
                self.listing.left_out[group.name] = "is a group, and a word of its own in selections"
            elif group.name not in _IMPLIED:
                words = [name for name in group.hosts if name in self.listing]
                self.listing.add_group(group.name, group.at, [*words, *self._inner(group)])
        return self.listing.read("a line is a host: node1 ansible_host=10.0.0.11")

    def _inner(self, group: Group) -> Iterator[str]:
        """The groups in a group; of one that has no place in an inventory, its hosts."""
        for child in group.children:
            if child in RESERVED or child in _IMPLIED:
                yield from (name for name in self._below(child) if name in self.listing)
            else:
                yield child

    # ---- variables

    def _merged(self) -> dict[str, Variables]:
        """The variables of each host: those of groups, outer ones first, then those of their files, then its own."""
        merged: dict[str, Variables] = {name: {} for name in self.hosts}
        ordered = self._ordered()
        by_group = [(group.name, group.variables) for group in ordered] + [
            (group.name, group.more) for group in ordered
        ]
        for group, variables in by_group:
            for name in (self.hosts if group == "all" else self._below(group)) if variables else ():
                merged[name].update(variables)
        for name, own in self.variables.items():
            merged[name].update(own)
        return merged

    def _ordered(self) -> list[Group]:
        """Groups by depth, then priority, then name, as Ansible has them: later ones take precedence."""
        parents: dict[str, list[str]] = {name: [] for name in self.groups}
        for group in self.groups.values():
            for child in group.children:
                parents.setdefault(child, []).append(group.name)
        depth = dict.fromkeys(parents, 1)
        try:
            for name in TopologicalSorter(parents).static_order():
                depth[name] = max([1, *(depth[parent] + 1 for parent in parents[name] if parent != "all")])
        except CycleError:  # told with the groups
            pass
        depth["all"] = 0
        return sorted(self.groups.values(), key=lambda group: (depth[group.name], self._priority(group), group.name))

    def _priority(self, group: Group) -> int:
        value = (group.variables | group.more).get(_PRIORITY)
        return int(value.text) if value is not None and re.fullmatch("[0-9]{1,9}", value.text) else 1

    def _below(self, name: str) -> Iterator[str]:
        """The hosts of a group and of those in it."""
        seen, waiting = {name}, [name]
        while waiting:
            group = self.groups.get(waiting.pop())
            if group is not None:
                yield from self._counted(group.hosts)
                waiting += [child for child in self._counted(group.children) if child not in seen]
                seen.update(group.children)

    def _counted(self, names: Collection[str]) -> Collection[str]:
        """These names. Raises InventoryError once they are too many in all: aliases and nested groups multiply."""
        self._steps += len(names)
        if self._steps > _MOST_STEPS:
            raise InventoryError(f"{self.listing.source}: has too many hosts in too many groups", hint="use fewer")
        return names

    # ---- hosts

    def _add(self, name: str, at: str, variables: Variables) -> None:
        variables = {
            variable: value for variable, value in variables.items() if not self._is_template(name, variable, value)
        }
        connection = variables.get(_CONNECTION, Value("ssh", at)).text
        if connection in _LOCAL:
            self.listing.add(name, at, {"transport": "local"})
            return
        if connection not in _SSH:
            self.listing.left_out[name] = f"is reached by {connection}, not by SSH"
            return
        keys: dict[str, Any] = {}
        places: dict[str, str] = {}
        for key, words in _KEYS.items():
            for variable in filter(variables.__contains__, words):
                text = variables[variable].text
                if text:
                    keys[key] = int(text) if key == "port" and re.fullmatch("[0-9]{1,9}", text) else text
                    places[key] = f"{variables[variable].at}: {name!r} {variable}"
        for variable in filter(variables.__contains__, _ARGS):
            places["jump"] = f"{variables[variable].at}: {name!r} {variable}"
            try:
                jump = _jump(variables[variable].text)
            except ValueError as error:
                self.note(places["jump"], str(error), "for instance -o ProxyJump=ada@gateway")
                continue
            itself = {name, keys.get("address", name)}
            if jump is not None and re.sub(r"^.*@|:[0-9]+$", "", jump) not in itself:  # variables of all may name it
                keys["jump"] = jump
        self.listing.add(name, at, keys, places)

    def _is_template(self, name: str, variable: str, value: Value) -> bool:
        found = "{{" in value.text or "{%" in value.text
        if found:
            problem = "is a template, and nothing is evaluated here"
            self.note(f"{value.at}: {name!r} {variable}", problem, "write the value itself")
        return found


def _jump(text: str) -> str | None:
    """The jump hosts that options of ssh name. Raises ValueError for options that are something else."""
    words = iter(shlex.split(text))
    for word in words:
        if word.startswith("-J"):
            return word[2:] or next(words, "")
        if word.startswith("-o"):
            name, _, value = re.sub(r"[ =]+", "=", (word[2:] or next(words, "")).strip(), count=1).partition("=")
            if name.lower() == "proxyjump":
                return value
            if name.lower() == "proxycommand":
                return _by_command(value)
    return None


def _by_command(command: str) -> str:
    """The jump host of a ProxyCommand ``ssh -W %h:%p gateway``. Raises ValueError for other commands."""
    text = command.strip("\"'")
    if text.lower() == "none":
        return "none"
    match = _PLAIN_COMMAND.fullmatch(text)
    if match is None or "-W" not in match[1] + match[3]:
        raise ValueError("has a ProxyCommand that is no plain jump")
    port, user = re.search(r"-p +([0-9]+)", match[1]), re.search(r"-l +([^ ]+)", match[1])
    return (f"{user[1]}@" if user else "") + match[2] + (f":{port[1]}" if port else "")


def expand(word: str) -> list[str]:
    """Expands Ansible's ranges, whose ends belong to them. Raises UsageError for an invalid or too large one.

    >>> expand("node[08:10]")
    ['node08', 'node09', 'node10']
    >>> expand("db-[a:c]")
    ['db-a', 'db-b', 'db-c']
    """
    parts = _RANGE.split(word)
    choices = [[parts[0]]]
    for low, high, step, after in zip(parts[1::4], parts[2::4], parts[3::4], parts[4::4], strict=True):
        choices += [_count(word, low, high, int(step or 1)), [after]]
    if any("[" in part or "]" in part for part in parts[::4]):
        raise UsageError(f"{word!r} has brackets that are no range", hint="ranges look like node[01:10] or db-[a:c]")
    if math.prod(map(len, choices)) > MOST:
        raise UsageError(f"{word!r} stands for more than {MOST} hosts", hint="is it a slip of the finger?")
    return ["".join(choice) for choice in itertools.product(*choices)]


def _count(word: str, low: str, high: str, step: int) -> list[str]:
    numbers = low.isdigit()
    if numbers != high.isdigit() or (not numbers and low.islower() != high.islower()):
        raise UsageError(f"{word!r} has a range from {low!r} to {high!r}", hint="both numbers, or both letters")
    first, last = (int(low), int(high)) if numbers else (ord(low), ord(high))
    if step < 1 or first > last:
        raise UsageError(f"{word!r} has a range that counts down", hint=f"write [{high}:{low}]")
    if (last - first) // step >= MOST:
        raise UsageError(f"{word!r} stands for more than {MOST} hosts", hint="is it a slip of the finger?")
    width = len(low) if low.startswith("0") else 0
    return [str(item).zfill(width) if numbers else chr(item) for item in range(first, last + 1, step)]
