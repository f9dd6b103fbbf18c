"""Reads the files of an Ansible inventory: INI and YAML, and the variables in group_vars and host_vars beside them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from skyfab._util.suggest import did_you_mean
from skyfab.errors import InventoryError
from skyfab.inventory.ansible import VARIABLES, Group, Tree, Value, Variables
from skyfab.inventory.file import Contents
from skyfab.inventory.host import NAME
from skyfab.inventory.text import lines_of, read_text
from skyfab.inventory.yaml_nodes import Node, compose

YAML: Final = (".yml", ".yaml", ".json")
_SECTION: Final = re.compile(r"\[([^:\]\s]+)(?::([a-z]+))?\]\s*(?:[#;].*)?")


def read(text: str, source: str, beside: Path | None = None) -> Contents:
    """The hosts of an inventory; `beside` is its folder, in which group_vars and host_vars are looked for.

    Raises one `InventoryError` with all mistakes.
    """
    tree = Tree(source)
    try:
        if source.endswith(YAML) or is_yaml(text):
            _Yaml(tree, source, text).read()
        else:
            _read_ini(tree, source, text)
        if beside is not None:
            _read_beside(tree, beside)
    except RecursionError:
        raise InventoryError(f"{source}: is nested too deeply", hint="groups are enough") from None
    return tree.read()


def is_yaml(text: str) -> bool:
    """Whether the first line that says something is one of a YAML file, not of an INI file."""
    first = next((line for line in lines_of(text) if line.strip() and line.lstrip()[0] not in "#;"), "")
    return first.startswith(("---", "{", "- ")) or re.fullmatch(r"""["']?[\w.-]+["']?:(\s.*)?""", first) is not None


# ---- INI


def _read_ini(tree: Tree, source: str, text: str) -> None:
    group, kind = tree.group("ungrouped", source), "hosts"
    declared: set[str] = {"all", "ungrouped"}
    for number, line in enumerate(lines_of(text), 1):
        line, at = line.strip(), f"{source}:{number}"
        if not line or line[0] in "#;":
            continue
        if match := _SECTION.fullmatch(line):
            group, kind = tree.group(match[1], at), match[2] or "hosts"
            if kind not in ("hosts", "children", "vars"):
                hint = did_you_mean(kind, ("hosts", "children", "vars"))
                tree.note(at, f"[{match[1]}:{kind}]: is no section", hint or "there are :children and :vars")
            if kind != "vars":
                declared.add(match[1])
        elif line.startswith("[") and "]" not in line:
            tree.note(at, "has a bracket that does not end", "a section is [group] on a line of its own")
        elif kind == "hosts":
            _read_host(tree, group, line, at)
        elif kind == "children":
            group.children[line.split("#")[0].strip()] = None
        elif kind == "vars":
            name, equals, value = (part.strip() for part in line.partition("="))
            if not equals:
                tree.note(at, f"is no variable of [{group.name}:vars]", "write ansible_user=ada")
            elif name in VARIABLES:
                group.variables[name] = Value(_unquoted(value), at)
    for name in sorted(tree.groups.keys() - declared):
        at = tree.groups[name].at
        tree.note(at, f"[{name}:vars]: there is no group {name}", did_you_mean(name, declared) or f"add [{name}]")


def _read_host(tree: Tree, group: Group, line: str, at: str) -> None:
    try:
        word, *words = shlex.split(line, comments=True)
    except ValueError:
        tree.note(at, "has a quote that does not end", 'write ansible_ssh_common_args="-o ProxyJump=gateway"')
        return
    variables: Variables = {}
    match = re.fullmatch(r"((?:[^:\[]|\[[^\]]*\])+):([0-9]+)", word)
    word, port = (match[1], match[2]) if match else (word, "")
    for item in words:
        name, equals, value = item.partition("=")
        if not equals:
            tree.note(at, f"{item!r} is no variable", "a line is one host; variables are name=value")
        elif name in VARIABLES:
            variables[name] = Value(value, at)
    tree.add_hosts(word, at, group, variables, port)


def _unquoted(value: str) -> str:
    """A value as Ansible takes it, which is as Python does: without quotes, and a number without its comment."""
    match = re.fullmatch(r"""(?:(["'])(.*)\1|([0-9]+))\s*(?:#.*)?""", value)
    return value if match is None else match[3] or match[2]


# ---- YAML


_Pair = tuple[str, Node, Node]
"""A name in a mapping, the node of it, and the value."""


class _Yaml:
    def __init__(self, tree: Tree, source: str, text: str) -> None:
        self._tree = tree
        self._source = source
        self._known: dict[int, list[_Pair]] = {}
        self._root = compose(text, source)

    def read(self) -> None:
        waiting = self._pairs(self._root, "an inventory")[::-1]
        if "plugin" in (name for name, _, _ in waiting):
            hint = "write down what it finds: ansible-inventory --list --yaml"
            self._tree.note(self._source, "is the configuration of a plugin, and none is run here", hint)
            return
        seen: set[tuple[str, int]] = set()
        while waiting:
            name, key, value = waiting.pop()
            if (name, id(value)) not in seen:
                seen.add((name, id(value)))
                waiting += self._group(self._tree.group(name, self._at(key)), value)

    def variables(self) -> Variables:
        """Those of a file in group_vars or host_vars."""
        return self._variables(self._root, "a file of variables")

    def _group(self, group: Group, node: Node) -> list[_Pair]:
        """Reads a group, and returns those in it, the last one first."""
        inner: list[_Pair] = []
        for part, key, value in self._pairs(node, f"group {group.name!r}"):
            if part == "hosts" and value.kind == "scalar":
                self._tree.add_hosts(value.text, self._at(value), group, {})
            elif part == "hosts":
                for word, at, variables in self._pairs(value, f"hosts of {group.name!r}"):
                    self._tree.add_hosts(word, self._at(at), group, self._variables(variables, repr(word)))
            elif part == "children":
                inner = self._pairs(value, f"children of {group.name!r}")
                group.children.update(dict.fromkeys(name for name, _, _ in inner))
            elif part == "vars":
                group.variables.update(self._variables(value, f"vars of {group.name!r}"))
            else:
                hint = did_you_mean(part, ("hosts", "children", "vars")) or "there are hosts, children and vars"
                self._tree.note(self._at(key), f"group {group.name!r}: {part} is no key of a group", hint)
        return inner[::-1]

    def _variables(self, node: Node | None, what: str) -> Variables:
        found: Variables = {}
        for name, key, value in self._pairs(node, what):
            if name not in VARIABLES or value.kind == "null":
                continue
            at = self._at(key)
            if value.kind != "scalar":
                self._tree.note(f"{at}: {name}", "must be a text", "write the value after the colon")
            elif value.tag:
                self._tree.note(f"{at}: {name}", f"is {value.tag}, which cannot be read here", "write the value itself")
            else:
                found[name] = Value(value.text, at)
        return found

    def _pairs(self, node: Node | None, what: str) -> list[_Pair]:
        """The names and values of a mapping, those that it merges (``<<``) first; nothing for null."""
        if node is None or node.kind == "null":
            return []
        if node.kind != "mapping":
            self._tree.note(self._at(node), f"{what} must be a mapping", "each name has a colon after it")
            return []
        if id(node) in self._known:  # by an alias; of itself, there is nothing
            return self._known[id(node)]
        self._known[id(node)] = []
        merged: dict[str, _Pair] = {}
        own: dict[str, _Pair] = {}
        for key, value in zip(node.parts[::2], node.parts[1::2], strict=True):
            if key.kind == "merge":
                for one in value.parts if value.kind == "sequence" else [value]:
                    for pair in self._pairs(one, what):
                        merged.setdefault(pair[0], pair)
            elif key.kind == "scalar":
                own[key.text] = (key.text, key, value)
            else:
                self._tree.note(self._at(key), f"{what} has a key that is no name", "write a name and a colon")
        self._known[id(node)] = list((merged | own).values())
        return self._known[id(node)]

    def _at(self, node: Node) -> str:
        return f"{self._source}:{node.line}"


# ---- group_vars and host_vars


def _read_beside(tree: Tree, folder: Path) -> None:
    """Takes the variables in files that are named after groups and hosts, or in folders of that name."""
    for group in tree.groups.values():
        for path in _files(folder / "group_vars", group.name):
            group.more.update(_variables(tree, path))
    for name in tree.hosts:
        for path in _files(folder / "host_vars", name):
            tree.variables[name].update(_variables(tree, path))


def _variables(tree: Tree, path: Path) -> Variables:
    text = read_text(path)
    if text.startswith("$ANSIBLE_VAULT"):
        tree.listing.left_out[str(path)] = "is encrypted"
        return {}
    return _Yaml(tree, str(path), text).variables()


def _files(folder: Path, name: str) -> Iterator[Path]:
    if not NAME.fullmatch(name) or not folder.is_dir():
        return
    for suffix in ("", *YAML):
        path = folder / f"{name}{suffix}"
        if path.is_dir():
            yield from sorted(one for one in path.iterdir() if one.suffix in ("", *YAML) and one.is_file())
        elif path.is_file():
            yield path
