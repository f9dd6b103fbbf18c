"""`Inventory`: the user's hosts and groups, read from a file or another source, and the selection of some of them."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Final

from skyfab._util import toml
from skyfab._util.html import ShownAsTable
from skyfab._util.sizes import counted
from skyfab.errors import InventoryError, UnknownHost, UsageError
from skyfab.inventory import ansible, file, hostfile, slurm, ssh_config
from skyfab.inventory.file import bare, read
from skyfab.inventory.host import LOCAL, Address, Host, expanded
from skyfab.inventory.selection import Names, choose
from skyfab.inventory.source import Contents, Source, read_text

_SOURCES: Final[tuple[Source, ...]] = (
    *(file.SOURCE, ansible.SOURCE, slurm.SOURCE, ssh_config.SOURCE, hostfile.SOURCE),
)
_TOML: Final = re.compile(r"^\s*\[\s*(hosts\s*\.|defaults\s*\]|groups\s*\])", re.MULTILINE)
_ANSIBLE: Final = re.compile(r"""^\s*(\[|---|\{|- |["']?[\w.-]+["']?:(\s|$))|^\s*[^#;\s].*ansible_""", re.MULTILINE)
_ANSIBLE_SUFFIXES: Final = (".yml", ".yaml", ".json", ".ini", ".cfg")
_UNCLEAR: Final = re.compile(r"^\s*([^#;\s:]+:[0-9]+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory(ShownAsTable):
    """The `hosts` by name, in the order of the file (`source`), and their `groups`; `left_out` has skipped entries.

    >>> inventory = Inventory.parse('[hosts."node[1-4]"]')
    >>> [host.name for host in inventory.select("node*,!node3")]
    ['node1', 'node2', 'node4']
    """

    hosts: Mapping[str, Host]
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The names of each group's hosts; nested groups are resolved."""
    source: Path | None = field(default=None, compare=False)
    """The file, or the word of another source; None if there is none: then any word may be an ssh_config alias."""
    left_out: Mapping[str, str] = field(default_factory=dict, compare=False)
    """What was skipped of its source, by name, with the reason."""

    def __repr__(self) -> str:
        sizes = [(len(self.hosts), "host"), *([(len(self.groups), "group")] if self.groups else [])]
        counts = ", ".join(counted(count, noun) for count, noun in sizes)
        return f"<Inventory {self.source or 'without a file'}: {counts}>"

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        groups = {host: [name for name, of in self.groups.items() if host in of] for host in self.hosts}
        return ("host", "login", "groups"), [
            (host.name, host.login, ", ".join(groups[host.name])) for host in self.hosts.values()
        ]

    def __post_init__(self) -> None:
        for group, members in self.groups.items():
            if strange := set(members) - set(self.hosts) - {LOCAL.name}:
                raise UsageError(f"group {group} contains unknown hosts: {', '.join(sorted(strange))}")

    @classmethod
    def of(cls, given: str | os.PathLike[str] | Inventory | None) -> Inventory:
        """The inventory for `given`: an `Inventory` unchanged, a file or another source; for None, what `find` returns.

        A file is an inventory.toml, a hostfile or an inventory of Ansible, recognized by its content. Other sources
        have names: ``"ssh_config"``, ``"ssh_config:gpu*"``, ``"slurm"``, and ``"hostfile:PATH"`` and
        ``"ansible:PATH"`` for files of that kind. Raises InventoryError.
        """
        if isinstance(given, Inventory):
            return given
        return cls.find() if given is None else cls(source=Path(given), **_read(given)._asdict())

    @classmethod
    def find(cls) -> Inventory:
        """The inventory of ``$SKYFAB_INVENTORY``, else of this folder, else of the user; else only `local`."""
        found = _found_source()
        if isinstance(found, Path) and os.environ.get("SKYFAB_INVENTORY") and not os.path.lexists(found):
            hint = "unset SKYFAB_INVENTORY, which names it; or for hosts of a lab: skyfab lab.up"
            raise InventoryError(f"{found}: No such file or directory", hint=hint)
        return cls(hosts={LOCAL.name: LOCAL}) if found is None else cls.of(found)

    @property
    def is_found(self) -> bool:
        """Whether `find` returns this inventory, so that commands need not name it."""
        try:
            return self.source is not None and Path.cwd() / self.source == Path.cwd() / (_found_source() or "")
        except FileNotFoundError:  # the current folder has been removed
            return False

    @classmethod
    def parse(cls, text: str, source: str | os.PathLike[str] = "<text>") -> Inventory:
        """Reads TOML `text`; `source` is what error messages call it. Raises `InventoryError` with every mistake."""
        return cls(source=Path(source), **read(text, os.fspath(source))._asdict())

    def to_toml(self) -> str:
        """The text of an inventory.toml that has these hosts and groups."""
        tables = ["\n".join([f"[hosts.{bare(name)}]", *_lines(host)]) + "\n" for name, host in self.hosts.items()]
        if self.groups:
            lines = [f"{bare(name)} = {_value(members)}" for name, members in self.groups.items()]
            tables.append("\n".join(["[groups]", *lines]) + "\n")
        return "\n".join(tables)

    def select(
        self,
        hosts: str | Host | Iterable[str | Host] | None = None,
        *,
        nodes: int | None = None,
    ) -> tuple[Host, ...]:
        """The hosts that `hosts` names, in order of mention and once each; for None, all hosts.

        A word is a host, else a group, else a tag; ``all``; ``node[1-4]``; a pattern like ``node*``; any of these
        after ``!`` to exclude it; an address like ``ada@10.0.0.5:2222``; ``local``. `nodes` limits it to the first few.
        With an inventory file, a plain word that is not in it is an error unless it is an alias of ssh_config.

        Raises `UnknownHost` for words that match nothing, `UsageError` if too few hosts are selected.
        """
        if hosts is None:
            hosts = self.hosts.values()
        items = hosts if isinstance(hosts, Iterable) and not isinstance(hosts, str) else [hosts]
        aliases = functools.cache(ssh_config.aliases)

        def stranger(word: str) -> Host | None:
            known = self.source is None or any(char in word for char in ".@:") or word in aliases()
            return self._ad_hoc(word) if known else None

        try:
            chosen = tuple(choose(items, Names(self.hosts, self.groups, aliases), stranger).values())
        except UnknownHost as error:
            place = "" if self.source is None else f"{self.source}: "
            raise UnknownHost(place + error.message, hint=error.hint) from None
        return _first(chosen, nodes)

    def jump_chain(self, host: Host) -> tuple[Host, ...]:
        """The jump hosts on the way to `host`, the nearest first; empty if it is reached directly.

        The first hop may have jump hosts of its own, which come before it.
        """
        chain: list[Host] = []
        start = host.name
        while host.jump is not None and host.jump != "none":
            hops = [self._hop(word) for word in host.jump.split(",")]
            chain[:0] = hops
            names = [start, *(hop.name for hop in reversed(chain))]
            if len(set(names)) < len(names):
                raise InventoryError(f"jump hosts form a loop: {' → '.join(names)}", hint='end it with jump = "none"')
            host = hops[0]
        return tuple(chain)

    def _hop(self, word: str) -> Host:
        host = self.hosts.get(word) or self._ad_hoc(word)
        assert host is not None, "Host has checked its jump"
        return host

    def _ad_hoc(self, word: str) -> Host | None:
        """A host for an address that is not in the inventory; ``root@node1`` is the inventory's node1, as root."""
        name = word.removeprefix("ssh://")
        address = Address.parse(name)
        base = None if address is None else self.hosts.get(address.host)
        if address is None or base is None or base.transport == "local":
            return Host.ad_hoc(name)
        user, port = address.user or base.user, address.port or base.port
        return replace(base, name=name, address=base.destination, user=user, port=port)


def _found_source() -> Path | str | None:
    """The file, or the word, of ``$SKYFAB_INVENTORY``, else the inventory file of this folder, else of the user."""
    if named := os.environ.get("SKYFAB_INVENTORY"):
        return named if is_word(named) else expanded(named)
    config = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not config.is_absolute():  # then the XDG specification says to ignore it
        config = expanded("~/.config")
    paths = (Path("inventory.toml"), Path(config, "skyfab", "inventory.toml"))
    return next(filter(os.path.lexists, paths), None)


def is_word(given: str) -> bool:
    """Whether this is the word of a source, and not the path of a file."""
    return any(source.names(given) for source in _SOURCES)


def _read(given: str | os.PathLike[str]) -> Contents:
    """The hosts of a source: its word, or the path of a file. Raises InventoryError."""
    for source in _SOURCES:
        if isinstance(given, str) and source.names(given):
            rest = given.partition(":")[2]
            return source.read(str(expanded(rest)) if source.takes == "path" else rest)
    return source_of(Path(given)).read(os.fspath(given))


def source_of(path: Path) -> Source:
    """The source that a file is of, by its name or its text: a list of names is a hostfile.

    Raises InventoryError if it is not readable, or ambiguous.
    """
    text = "" if path.is_dir() else read_text(path)
    if path.suffix == ".toml" or _TOML.search(text):
        return file.SOURCE
    if path.suffix in _ANSIBLE_SUFFIXES or path.is_dir() or _ANSIBLE.search(text):
        return ansible.SOURCE
    if (line := _UNCLEAR.search(text)) and not re.search(r"\b(slots|count|cpu)\s*=", text):
        raise InventoryError(
            f"{path}: in {line[1][:60]!r}, is the number the host's slots (MPI) or its port (Ansible)?",
            hint=f"write hostfile:{path} or ansible:{path}",
        )
    return hostfile.SOURCE


def _first(hosts: tuple[Host, ...], nodes: int | None) -> tuple[Host, ...]:
    if not hosts:
        raise UsageError("no hosts are selected", hint="name some, or exclude fewer")
    if nodes is None:
        return hosts
    if type(nodes) is not int or nodes < 1:
        raise UsageError(f"nodes must be 1 or more, not {nodes!r}", hint="omit it to use all hosts")
    if nodes > len(hosts):
        raise UsageError(f"nodes={nodes}, but only {counted(len(hosts), 'host')} selected", hint="select more hosts")
    return hosts[:nodes]


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
    return toml.dumps(value)
