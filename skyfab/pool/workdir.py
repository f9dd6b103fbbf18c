"""The working folder: where relative paths of functions lead on each host, and what has been written there.

``"auto"`` is the folder that stands for the current one here: on a host a folder of its own in the cache, which stays;
on this machine the current folder itself. A path is that folder on every host. ``"temp"`` goes with the pool.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from skyfab.errors import SkyfabError, UsageError
from skyfab.inventory.host import CHECKS, Host
from skyfab.inventory.inventory import Inventory
from skyfab.protocol import messages
from skyfab.protocol.blobs import name_of
from skyfab.ui.events import Events, FilesWritten

_PATIENCE: Final = 2.0
"""Seconds that hosts have to say what was written, when a pool closes."""
_HEARD: Final = 3.0
"""Seconds since a host was heard, after which it is not asked."""
_LARGEST: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Workdir:
    """The working folder on one host."""

    told: str = ""
    """What its agent is told: a path, the name of a folder in its cache, or nothing for the pool's own."""
    callers: bool = False
    """It is the caller's own folder, which has everything already."""


class Workdirs:
    """The working folder of a pool on each of its hosts."""

    def __init__(self, choice: str | os.PathLike[str]) -> None:
        """Raises UsageError for what cannot be one."""
        try:
            self._choice: str = CHECKS["workdir"](os.fspath(choice) if isinstance(choice, os.PathLike) else choice)
        except UsageError as error:
            raise UsageError(f"workdir {error.message}", hint=error.hint) from None
        self._here = _current()

    def of(self, host: Host) -> Workdir:
        choice = host.workdir if self._choice == "auto" else self._choice
        if choice == "temp" or (choice == "auto" and not self._here):
            return Workdir()
        if host.transport == "local" and choice in ("auto", self._here):
            return Workdir(self._here, callers=True)
        return Workdir(project(self._here) if choice == "auto" else choice)


def _current() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it has been removed
        return ""


def project(folder: str) -> str:
    """The name that a folder of this machine and user has on hosts: readable, and no other folder's."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user made up for a container has no name
        user = str(os.getuid())
    readable = re.sub(r"[^A-Za-z0-9_]+", "-", Path(folder).name).strip("-")[:40] or "project"
    return f"{readable}-{name_of(os.fsencode(f'{user}@{os.uname().nodename}:{folder}'))[:8]}"


# ---- what was written


@dataclass(frozen=True, slots=True)
class Written:
    """What processes have written in one working folder."""

    workdir: str
    """As its agent was told."""
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
        return f"{count} ({_size(self.size)}): {names}"


def _size(count: int) -> str:
    """
    >>> _size(12), _size(3456), _size(123_456_789)
    ('12 bytes', '3 kB', '123 MB')
    """
    if count < 1000:
        return f"{count} byte{'' if count == 1 else 's'}"
    if count < 1_000_000:
        return f"{count / 1e3:.0f} kB"
    return f"{count / 1e6:.{0 if count >= 10_000_000 else 1}f} MB"


def parse(document: object) -> list[Written]:
    """What a host said; it may say anything."""
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


class Reached(Protocol):
    """A node of a pool, as far as it is asked here."""

    name: str
    host: Host
    lost: Exception | None
    workdir: Workdir

    @property
    def session(self) -> Any: ...


def tell_files(nodes: Sequence[Reached], inventory: Inventory, events: Events) -> None:
    """Emits what was written on hosts other than this one. Those that do not answer soon are left out."""
    if not events.active:
        return
    answers: dict[str, list[Written]] = {}
    waiting: list[Reached] = []
    for node in nodes:
        if node.lost is None and is_kept(node) and time.monotonic() - node.session.heard < _HEARD:
            with suppress(SkyfabError):
                node.session.send(messages.Written(), answer=_answer(answers, node), failure=_failure(answers, node))
                waiting.append(node)
    until = time.monotonic() + _PATIENCE
    for node in waiting:
        node.session.wait(lambda node=node: node.name in answers, max(0.0, until - time.monotonic()))
        for written in answers.get(node.name, ()):
            if written.workdir == node.workdir.told:
                events.emit(event(node.host, inventory, written))


def event(host: Host, inventory: Inventory, written: Written) -> FilesWritten:
    """What lies where, and how to get it."""
    path, fetch = path_of(host, written.workdir), to_fetch(host, inventory, written.workdir)
    return FilesWritten(host=host.name, path=path, what=str(written), fetch=fetch)


def _answer(answers: dict[str, list[Written]], node: Reached) -> Callable[[messages.Message, Any], None]:
    def take(message: messages.Message, _: Any) -> None:
        answers[node.name] = []
        with suppress(ValueError, RecursionError):
            if isinstance(message, messages.Done):
                answers[node.name] = parse(json.loads(message.text))

    return take


def _failure(answers: dict[str, list[Written]], node: Reached) -> Callable[[Exception], None]:
    def take(_: Exception) -> None:
        answers[node.name] = []

    return take


def is_kept(node: Reached) -> bool:
    """Its working folder is on another machine, and stays there."""
    return bool(node.workdir.told) and node.host.transport != "local"


def path_of(host: Host, workdir: str) -> str:
    """The folder's path on the host, as a person would type it there."""
    return workdir if workdir.startswith(("/", "~")) else f"{host.cache.rstrip('/')}/files/{workdir}"


def to_fetch(host: Host, inventory: Inventory, workdir: str) -> str:
    """The command that copies the folder to this machine, to a folder named after the host: hosts have equal names."""
    words = ["scp", "-r", *(["-P", str(host.port)] if host.port not in (None, 22) else [])]
    words += ["-i", host.identity] if host.identity else []
    if host.jump and host.jump != "none":
        known = inventory.hosts
        words += ["-J", ",".join(known[hop].login if hop in known else hop for hop in host.jump.split(","))]
    place = f"[{host.destination}]" if ":" in host.destination else host.destination
    login = place if host.user is None else f"{host.user}@{place}"
    path = path_of(host, workdir)
    return shlex.join([*words, f"{login}:{path.removeprefix('~/')}", f"./{host.name}"])
