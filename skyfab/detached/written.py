"""Which files were written to a working folder on a host, as reported by the host, and the command that copies them."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Final

from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.sizes import readable
from skyfab.ui.events import FilesWritten

_LARGEST: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Written:
    """The files that processes have written to one working folder."""

    workdir: str
    """As it was sent to the agent."""
    count: int
    size: int
    names: tuple[str, ...]
    complete: bool

    def __str__(self) -> str:
        """
        >>> str(Written("mnist-1a2b3c4d", 2, 5_000_000, ("model.pt", "log.csv"), True))
        '2 files (5.0 MB): model.pt, log.csv'
        """
        count = f"{'' if self.complete else 'at least '}{self.count} file{'' if self.count == 1 else 's'}"
        names = ", ".join(self.names) + (", …" if self.count > len(self.names) else "")
        return f"{count} ({readable(self.size)}): {names}"


def parse(document: object) -> list[Written]:
    """Parses a host's report, which may contain anything; invalid entries are skipped."""
    found = []
    for said in document if isinstance(document, list) else ():
        if not isinstance(said, dict):
            continue
        workdir, names = said.get("workdir"), said.get("names")
        count, size = _number(said.get("count")), _number(said.get("size"))
        if isinstance(workdir, str) and isinstance(names, list) and count and size is not None:
            shown = tuple(name[:80] for name in names[:3] if isinstance(name, str))
            found.append(Written(workdir, count, size, shown, said.get("complete") is True))
    return found


def _number(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < _LARGEST else None


def event(host: Host, inventory: Inventory, written: Written) -> FilesWritten:
    """The event that shows the path of the files and the command that copies them."""
    path, fetch = path_of(host, written.workdir), to_fetch(host, inventory, written.workdir)
    return FilesWritten(host=host.name, path=path, what=str(written), fetch=fetch)


def path_of(host: Host, workdir: str) -> str:
    """The folder's path on the host, as a user would type it there."""
    return workdir if workdir.startswith(("/", "~")) else f"{host.cache.rstrip('/')}/files/{workdir}"


def to_fetch(host: Host, inventory: Inventory, workdir: str) -> str:
    """The command that copies the folder to this machine, into a folder named after the host.

    Working folders have the same name on all hosts.
    """
    words = ["scp", "-r", *(["-P", str(host.port)] if host.port not in (None, 22) else [])]
    words += ["-i", host.identity] if host.identity else []
    if host.jump and host.jump != "none":
        known = inventory.hosts
        words += ["-J", ",".join(known[hop].login if hop in known else hop for hop in host.jump.split(","))]
    place = f"[{host.destination}]" if ":" in host.destination else host.destination
    login = place if host.user is None else f"{host.user}@{place}"
    path = path_of(host, workdir)
    return shlex.join([*words, f"{login}:{path.removeprefix('~/')}", f"./{host.name}"])
