"""Which files were written to a working folder on a host, as reported by the host, and the command that copies them."""

from __future__ import annotations

import getpass
import os
import posixpath
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from skyfab._util import schema
from skyfab._util.hints import HINTS
from skyfab._util.sizes import counted, readable
from skyfab.errors import UsageError
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.protocol.blobs import name_of
from skyfab.ui.events import FilesWritten

_LIMITS: Final = schema.Limits(characters=1000, items=1000)
_NAMES: Final = 3
"""Names of files that are shown."""
_NAME: Final = 80
"""Characters of each."""
_COMMON: Final = 200
"""Most characters of a path that a command names."""


@dataclass(frozen=True, slots=True)
class Written:
    """The files that processes have written to one working folder."""

    workdir: str
    """As it was sent to the agent."""
    count: int
    size: int
    names: tuple[str, ...]
    complete: bool
    common: str = ""
    """The file, if it is one, or the folder that all of them are in."""

    def __str__(self) -> str:
        """
        >>> str(Written("mnist-1a2b3c4d", 2, 5_000_000, ("model.pt", "log.csv"), True))
        '2 files (5.0 MB): model.pt, log.csv'
        """
        count = f"{'' if self.complete else 'at least '}{counted(self.count, 'file')}"
        names = [re.sub(r"\s", " ", name[:_NAME]) for name in self.names[:_NAMES]]
        more = ["…"] if self.count > len(names) else []
        return f"{count} ({readable(self.size)}): {', '.join([*names, *more])}"

    @property
    def is_safe(self) -> bool:
        """A host may send anything, and the folder becomes part of a command that users copy."""
        return re.fullmatch(r"[\w./~+-]+", self.workdir, re.ASCII) is not None

    @property
    def inner(self) -> str:
        """What to fetch of the folder: the file, or the folder in it that all files are in; else all of it."""
        return self.common if self.complete and _is_plain(self.common) else "."

    @property
    def paths(self) -> tuple[str, ...]:
        """The files, if all are known and none could be taken for a pattern; else what all are in."""
        is_known = self.complete and len(self.names) == self.count
        is_known &= all(_is_plain(name) and not re.search(r"[*?[]", name) for name in self.names)
        return self.names if is_known else (self.inner,)


def _is_plain(name: str) -> bool:
    """Whether a name that a host has sent can be part of a command as it is."""
    return name.isprintable() and 0 < len(name) < _COMMON and name[0] not in "-~/" and ".." not in name


def parse(document: object) -> tuple[Written, ...]:
    """Parses a host's report, which may contain anything. Raises schema.Invalid."""
    return schema.parse(tuple[Written, ...], document, _LIMITS)


def event(host: Host, inventory: Inventory, written: Written) -> FilesWritten:
    """The event that shows the path of the files and the command that copies them."""
    path, fetch = path_of(host, written.workdir), to_fetch(host, inventory, written.workdir, written.inner)
    return FilesWritten(host=host.name, path=path, what=str(written), fetch=fetch)


def path_of(host: Host, workdir: str) -> str:
    """The folder's path on the host, as a user would type it there."""
    return workdir if workdir.startswith(("/", "~")) else f"{host.cache.rstrip('/')}/files/{workdir}"


def to_fetch(host: Host, inventory: Inventory, workdir: str, inner: str = ".") -> str:
    """The command that copies the folder, or `inner` in it, to this machine, into a folder named after the host.

    It is `skyfab get`, if that finds the host by its name; else scp, which copies the folder.
    """
    is_listed = not host.inside or inventory.hosts.get(host.name) == host
    word = host.name if is_listed else f"{host.name}/{host.container or host.apptainer}"
    try:
        is_known = inventory.select(word) == (host,)
    except UsageError:
        is_known = False
    if not is_known:
        return _scp(host, inventory, workdir)
    is_gets = workdir == (project(current_folder()) if host.workdir == "auto" else host.workdir)
    place = inner if is_gets else posixpath.normpath(posixpath.join(path_of(host, workdir), inner))
    given = [] if inventory.source is None or inventory.is_found else [f"--inventory={inventory.source}"]
    return f"{HINTS.program} {shlex.join(['get', *given, place, f'--hosts={word}', f'--to={host.name}'])}"


def _scp(host: Host, inventory: Inventory, workdir: str) -> str:
    words = ["scp", "-r", *(["-P", str(host.port)] if host.port not in (None, 22) else [])]
    words += ["-i", host.identity] if host.identity else []
    if hops := inventory.jump_chain(host):
        words += ["-J", ",".join(hop.login for hop in hops)]
    place = f"[{host.destination}]" if ":" in host.destination else host.destination
    login = place if host.user is None else f"{host.user}@{place}"
    path = path_of(host, workdir)
    return shlex.join([*words, f"{login}:{path.removeprefix('~/')}", f"./{host.name}"])


def current_folder() -> str:
    """The current folder of this program; empty if it has been removed."""
    try:
        return str(Path.cwd())
    except OSError:
        return ""


def required_folder() -> Path:
    """The current folder. Raises UsageError if it has been removed: files of runs there would have no place here."""
    here = current_folder()
    if not here:
        raise UsageError("the current folder has been removed", hint="change to a folder that exists, for example: cd")
    return Path(here)


def project(folder: str) -> str:
    """The name, on hosts, of the folder that corresponds to one of this machine and user: readable and unique."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container may run under a user id without a name
        user = str(os.getuid())
    readable_name = re.sub(r"[^A-Za-z0-9_]+", "-", Path(folder).name).strip("-")[:40] or "project"
    return f"{readable_name}-{name_of(os.fsencode(f'{user}@{os.uname().nodename}:{folder}'))[:8]}"
