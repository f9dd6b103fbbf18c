"""Hosts and groups of an Ansible inventory, as ``ansible-inventory --list`` resolves them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from skyfab._util import schema
from skyfab.errors import InventoryError
from skyfab.inventory.builder import Listing
from skyfab.inventory.file import RESERVED
from skyfab.inventory.source import Contents, Source

_KEYS: Final = {
    "address": ("ansible_host", "ansible_ssh_host"),
    "port": ("ansible_port", "ansible_ssh_port"),
    "user": ("ansible_user", "ansible_ssh_user"),
    "identity": ("ansible_private_key_file", "ansible_ssh_private_key_file"),
}
"""Keys of a host with the variables that set them; of several, the last one counts."""
_ARGS: Final = ("ansible_ssh_common_args", "ansible_ssh_extra_args")
_SSH: Final = ("ssh", "smart", "paramiko", "paramiko_ssh", "ansible.builtin.ssh", "ansible.builtin.paramiko_ssh")
_LOCAL: Final = ("local", "ansible.builtin.local")
_IMPLIED: Final = ("all", "ungrouped")
"""Groups that Ansible adds."""
_ENVIRONMENT: Final = {"ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "1", "ANSIBLE_NOCOLOR": "1"}


@dataclass(frozen=True)
class _Group:
    hosts: tuple[str, ...] = ()
    children: tuple[str, ...] = ()


def read(path: str | os.PathLike[str]) -> Contents:
    """The hosts of an inventory: a file or a folder. Raises InventoryError."""
    source = os.fspath(path)
    try:
        document = _listed(source)
        variables = schema.parse(dict[str, dict[str, Any]], document.pop("_meta", {}).get("hostvars", {}))
        groups = schema.parse(dict[str, _Group], document)
    except (AttributeError, json.JSONDecodeError, schema.Invalid) as error:
        problem = f"{source}: ansible-inventory printed something else than an inventory: {error}"
        raise InventoryError(problem, hint=_by_hand(source)) from error
    listing = Listing(source)
    for name in _hosts("all", groups):
        _add(listing, name, variables.get(name, {}))
    for name in groups:
        if name in RESERVED and name not in _IMPLIED:
            listing.left_out[name] = "the group's name is reserved in selections"
        elif name not in _IMPLIED:
            listing.add_group(name, source, [host for host in _hosts(name, groups) if host in listing])
    return listing.read("a line is a host: node1 ansible_host=10.0.0.11")


def _listed(source: str) -> dict[str, Any]:
    """What ``ansible-inventory`` prints."""
    if not Path(source).exists():
        raise InventoryError(f"{source}: no such file or folder", hint="check the path")
    command = [_program(source), "-i", source, "--list"]
    environ = {**os.environ, **_ENVIRONMENT}
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environ)
    if done.returncode == 0:
        return schema.parse(dict[str, Any], json.loads(done.stdout))
    raise InventoryError(
        f"{source}: Ansible cannot read it: {_problem(done.stderr)}",
        hint=_by_hand(source),
    )


def _by_hand(source: str) -> str:
    return f"ansible-inventory -i {shlex.quote(source)} --list"


def _program(source: str) -> str:
    """The program, from PATH or from the environment that skyfab is installed in."""
    beside = Path(sys.executable).with_name("ansible-inventory")
    found = shutil.which("ansible-inventory") or (str(beside) if beside.is_file() else None)
    if found is None:
        raise InventoryError(
            f"{source}: an Ansible inventory, and Ansible is not installed", hint="uv tool install ansible-core"
        )
    return found


def _problem(errors: str) -> str:
    """The first reason that Ansible gives."""
    lines = [re.sub(r"^\s*\[\w+\]:[\s*]*", "", line).strip() for line in errors.splitlines()]
    reasons = [line for line in lines if re.match("Failed to parse|Completely failed", line)] or lines or ["no reason"]
    return re.sub(r"^Failed to parse.*? plugin: (Failed to parse inventory: )?", "", reasons[0])


def _hosts(name: str, groups: Mapping[str, _Group]) -> Iterator[str]:
    """The hosts of a group and of those in it, once each and in the order of the inventory."""
    waiting, seen = [name], {name}
    found: dict[str, None] = {}
    while waiting:
        group = groups.get(waiting.pop(), _Group())
        found.update(dict.fromkeys(group.hosts))
        waiting += [child for child in group.children[::-1] if child not in seen]
        seen.update(group.children)
    yield from found


def _add(listing: Listing, name: str, variables: Mapping[str, Any]) -> None:
    at = f"{listing.source}: {name!r}"
    used = {variable: value for variable, value in variables.items() if variable.startswith("ansible_")}
    connection = used.get("ansible_connection", "ssh")
    if connection in _LOCAL:
        listing.add(name, listing.source, {"transport": "local"})
        return
    if connection not in _SSH:
        listing.left_out[name] = f"ansible_connection is {connection}, not SSH"
        return
    keys: dict[str, Any] = {}
    places: dict[str, str] = {}
    for key, words in _KEYS.items():
        for variable in words:
            value = used.get(variable)
            if key == "identity" and "{{" in str(value):  # in the others, the checks of their values find it
                raise InventoryError(f"{at} {variable}: contains a template: {value!r}", hint="write the path")
            if value not in (None, ""):
                keys[key] = _converted(key, value)
                places[key] = f"{at} {variable}"
    for variable in filter(used.__contains__, _ARGS):
        places["jump"] = f"{at} {variable}"
        try:
            jump = _jump(str(used[variable]))
        except ValueError as error:
            hint = "for instance -o ProxyJump=ada@gateway"
            raise InventoryError(f"{places['jump']}: {error}", hint=hint) from None
        itself = {name, keys.get("address", name)}
        if jump is not None and re.sub(r"^.*@|:[0-9]+$", "", jump) not in itself:  # variables of all may name it
            keys["jump"] = jump
    listing.add(name, listing.source, keys, places)


def _converted(key: str, value: Any) -> Any:
    """INI files have ports as strings, and YAML files user names as numbers."""
    if key == "port":
        return int(value) if isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value) else value
    return str(value) if isinstance(value, int) else value


def _jump(text: str) -> str | None:
    """The jump hosts in options of ssh. Raises ValueError for a ProxyCommand."""
    words = iter(shlex.split(text))
    for word in words:
        if word.startswith("-J"):
            return word[2:] or next(words, "")
        if word.startswith("-o"):
            name, _, value = re.sub(r"[ =]+", "=", (word[2:] or next(words, "")).strip(), count=1).partition("=")
            if name.lower() == "proxyjump":
                return value
            if name.lower() == "proxycommand" and value.lower() != "none":
                raise ValueError("a ProxyCommand is not supported: name the jump host")
    return None


SOURCE = Source(word="ansible", takes="path", read=read)
