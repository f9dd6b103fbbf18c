"""`Inventory`: the user's hosts and groups, read from a TOML file, and the selection of some of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from skyfab.errors import InventoryError, UnknownHost, UsageError
from skyfab.inventory.file import read
from skyfab.inventory.host import LOCAL, Address, Host, expanded
from skyfab.inventory.selection import Names, choose
from skyfab.notebook import ShownAsTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory(ShownAsTable):
    """`hosts` by name, in the order of the file (`source`, if any), and `groups` of them.

    >>> inventory = Inventory.parse('[hosts."node[1-4]"]')
    >>> [host.name for host in inventory.select("node*,!node3")]
    ['node1', 'node2', 'node4']
    """

    hosts: Mapping[str, Host]
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The names of each group's hosts; nested groups are resolved."""
    source: Path | None = None
    """The file; None if there is none: then any word may be an ssh_config alias."""

    def __repr__(self) -> str:
        sizes = [(len(self.hosts), "host"), *([(len(self.groups), "group")] if self.groups else [])]
        counts = ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in sizes)
        return f"<Inventory {self.source or 'of no file'}: {counts}>"

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        groups = {host: [name for name, of in self.groups.items() if host in of] for host in self.hosts}
        return ("host", "login", "groups"), [
            (host.name, host.login, ", ".join(groups[host.name])) for host in self.hosts.values()
        ]

    def __post_init__(self) -> None:
        for group, members in self.groups.items():
            if strange := set(members) - set(self.hosts) - {LOCAL.name}:
                raise UsageError(f"group {group} has {', '.join(sorted(strange))}, which is no host of the inventory")

    @classmethod
    def of(cls, given: str | os.PathLike[str] | Inventory | None) -> Inventory:
        """`given`, if it is an inventory; the one in that file; for None what `find` finds. Raises InventoryError."""
        if isinstance(given, Inventory):
            return given
        return cls.find() if given is None else cls.load(given)

    @classmethod
    def find(cls, environ: Mapping[str, str] | None = None, cwd: str | os.PathLike[str] = ".") -> Inventory:
        """The inventory of ``$SKYFAB_INVENTORY``, else of this folder, else of the user; else only `local`.

        `environ` and `cwd` take the place of the process's variables and current folder.
        """
        environ = os.environ if environ is None else environ
        path = found_file(environ, cwd)
        if path is not None and environ.get("SKYFAB_INVENTORY") and not os.path.lexists(path):
            hint = "unset SKYFAB_INVENTORY, which names it; or for hosts of a lab: skyfab lab.up"
            raise InventoryError(f"{path}: cannot be read: No such file or directory", hint=hint)
        return cls(hosts={LOCAL.name: LOCAL}) if path is None else cls.load(path)

    @property
    def is_found(self) -> bool:
        """Its file is the one that `find` finds: commands need not name it."""
        return self.source is not None and Path.cwd() / self.source == Path.cwd() / (found_file(os.environ) or "")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Inventory:
        """Reads the file `path`. Raises `InventoryError` with every mistake in it."""
        try:
            text = Path(path).read_bytes().decode("utf-8-sig")
        except OSError as error:
            raise InventoryError(
                f"{os.fspath(path)}: cannot be read: {error.strerror}",
                hint="check the path given; inventory.example.toml is one to copy",
            ) from None
        except ValueError as error:  # not UTF-8, or a NUL in the path
            raise InventoryError(f"{os.fspath(path)!r}: is not a text file: {error}", hint="save it as UTF-8") from None
        return cls.parse(text, path)

    @classmethod
    def parse(cls, text: str, source: str | os.PathLike[str] = "<text>") -> Inventory:
        """Reads TOML `text`; `source` is what error messages call it. Raises `InventoryError` with every mistake."""
        hosts, groups = read(text, os.fspath(source))
        return cls(hosts=hosts, groups=groups, source=Path(source))

    def select(
        self,
        hosts: str | Host | Iterable[str | Host] | None = None,
        *,
        nodes: int | None = None,
        alias: Callable[[str], bool] = lambda word: False,
    ) -> tuple[Host, ...]:
        """The hosts that `hosts` names, in order of mention and once each; for None, all hosts.

        A word is a host, else a group, else a tag; ``all``; ``node[1-4]``; a pattern like ``node*``; any of these
        after ``!`` to exclude it; an address like ``ada@10.0.0.5:2222``; ``local``. `nodes` limits it to the first few.
        With an inventory file, a plain word that is not in it is an error unless `alias` says that ssh_config has it.

        Raises `UnknownHost` for words that match nothing, `UsageError` if too few hosts are selected.
        """
        if hosts is None:
            hosts = self.hosts.values()
        items = hosts if isinstance(hosts, Iterable) and not isinstance(hosts, str) else [hosts]

        def stranger(word: str) -> Host | None:
            known = self.source is None or any(char in word for char in ".@:") or alias(word)
            return self._ad_hoc(word) if known else None

        try:
            chosen = tuple(choose(items, Names(self.hosts, self.groups), stranger).values())
        except UnknownHost as error:
            place = "" if self.source is None else f"{self.source}: "
            raise UnknownHost(place + error.message, hint=error.hint) from None
        return _first(chosen, nodes)

    def jump_chain(self, host: Host) -> tuple[Host, ...]:
        """The jump hosts on the way to `host`, the nearest first; empty if it is reached directly.

        The first hop may have jump hosts of its own, which come before it.
        """
        chain: list[Host] = []
        while host.jump is not None and host.jump != "none":
            hops = [self._hop(word) for word in host.jump.split(",")]
            chain[:0] = hops
            if len({hop.name for hop in chain}) < len(chain):
                raise InventoryError(f"jump goes in a circle through {host.name}", hint='end it with jump = "none"')
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


def found_file(environ: Mapping[str, str], cwd: str | os.PathLike[str] = ".") -> Path | None:
    """The inventory file of ``$SKYFAB_INVENTORY``, else of this folder, else of the user."""
    if named := environ.get("SKYFAB_INVENTORY"):
        return Path(cwd, expanded(named))
    config = Path(environ.get("XDG_CONFIG_HOME", ""))
    if not config.is_absolute():  # then the XDG specification says to ignore it
        config = expanded("~/.config")
    paths = (Path(cwd, "inventory.toml"), Path(config, "skyfab", "inventory.toml"))
    return next(filter(os.path.lexists, paths), None)


def _first(hosts: tuple[Host, ...], nodes: int | None) -> tuple[Host, ...]:
    if not hosts:
        raise UsageError("no hosts are selected", hint="name some, or exclude fewer")
    if nodes is None:
        return hosts
    if type(nodes) is not int or nodes < 1:
        raise UsageError(f"nodes must be a whole number from 1, not {nodes!r}", hint="leave it out to take all")
    if nodes > len(hosts):
        raise UsageError(f"nodes={nodes}, but only {len(hosts)} selected", hint="select more hosts, or ask for fewer")
    return hosts[:nodes]
