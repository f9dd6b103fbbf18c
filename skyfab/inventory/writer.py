"""Writes hosts and groups as an inventory.toml."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields

from skyfab._util import toml
from skyfab.inventory.file import bare
from skyfab.inventory.host import Host


def written(hosts: Mapping[str, Host], groups: Mapping[str, Sequence[str]]) -> str:
    """The text of a file that has these hosts and groups."""
    tables = ["\n".join([f"[hosts.{bare(name)}]", *_lines(host)]) + "\n" for name, host in hosts.items()]
    if groups:
        lines = [f"{bare(name)} = {_value(members)}" for name, members in groups.items()]
        tables.append("\n".join(["[groups]", *lines]) + "\n")
    return "\n".join(tables)


def _lines(host: Host) -> Iterator[str]:
    """The keys that differ from their defaults."""
    for item in fields(host):
        value = getattr(host, item.name)
        default = {} if item.default is MISSING else item.default
        if item.name != "name" and value != default:
            yield f"{item.name} = {_value(value)}"


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{bare(key)} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    return toml.dumps(value)
