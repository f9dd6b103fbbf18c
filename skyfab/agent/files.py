"""The working folder of a host's ranks: where relative paths of functions lead.

A project's folder in the cache, or a path that the user has named, stays when the pool goes. What the user included is
laid out in it, and whatever else has been written there can be told.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time

from skyfab.errors import ProtocolError

TYPE_CHECKING = False  # a cold host has no time for `typing`
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Final

INCLUDED: Final = "files"
"""The folder of a project's tree that holds what is laid out in the working folder."""
_MOST: Final = 20_000
_SECONDS: Final = 0.5
"""A look at a working folder ends after so many files and so long: there may be any number of them."""
_NAMES: Final = 3


def place(workdir: str, cache: str) -> str:
    """The path of a working folder: one that the user has named, or a project's in the cache. Empty: the pool's own."""
    if not workdir:
        return ""
    if workdir.startswith(("/", "~")):
        found = os.path.expanduser(workdir)
        if not found.startswith("/"):
            raise FileNotFoundError(f"the working folder {workdir}: there is no such user")
        return found
    if not workdir.replace("-", "").replace("_", "").replace(".", "").isalnum() or workdir.startswith("."):
        raise ProtocolError(f"not the name of a working folder: {workdir!r:.80}")
    return os.path.join(cache, "files", workdir)


def enter(folder: str, cache: str, included: str) -> None:
    """Makes the folder, puts into it what was included, and goes there. Raises OSError."""
    if folder:
        kept = os.path.join(cache, "files")
        if os.path.dirname(folder) == kept:
            for part in (kept, folder):
                os.makedirs(part, mode=0o700, exist_ok=True)
            os.utime(folder)  # it is in use: `skyfab gc` leaves it alone
        else:
            os.makedirs(folder, exist_ok=True)
        os.chdir(folder)
    for inner in _inside(included) if included else ():
        _lay_out(os.path.join(included, inner), inner)


def _lay_out(source: str, target: str) -> None:
    """Copies a file, unless it is there already. Several processes may do so at once."""
    if _same(source, target):
        return
    folder = os.path.dirname(target)
    if folder:
        os.makedirs(folder, exist_ok=True)
    draft = os.path.join(folder, f".{os.path.basename(target)}.{os.getpid()}.new")
    try:
        with open(source, "rb") as content, open(draft, "wb") as file:
            while piece := content.read(1 << 20):
                file.write(piece)
        found = os.stat(source)
        os.utime(draft, ns=(found.st_mtime_ns, found.st_mtime_ns))
        os.replace(draft, target)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def _same(source: str, target: str) -> bool:
    """It was laid out from there and not changed since, or is the same by chance."""
    try:
        ours, theirs = os.stat(source), os.stat(target)
        if ours.st_size != theirs.st_size or not stat.S_ISREG(theirs.st_mode):
            return False
        return ours.st_mtime_ns == theirs.st_mtime_ns or _equal(source, target)
    except OSError:
        return False


def _equal(source: str, target: str) -> bool:
    with open(source, "rb") as one, open(target, "rb") as other:
        while piece := one.read(1 << 20):
            if piece != other.read(1 << 20):
                return False
    return True


def _inside(folder: str) -> Iterator[str]:
    """The paths of all files below a folder, relative to it."""
    for path, _, names in os.walk(folder):
        for name in names:
            yield os.path.relpath(os.path.join(path, name), folder)


class Written:
    """What processes write in their working folders while a pool is open."""

    def __init__(self) -> None:
        self._folders: dict[str, tuple[str, float, set[str]]] = {}
        """For each working folder, as the client calls it: its path, since when, and what was included."""

    def begin(self, workdir: str, path: str, included: str) -> None:
        """A process is about to start there. Called in the pool's run folder, where gc looks for what is in use."""
        if workdir not in self._folders:
            since = time.time()
            with contextlib.suppress(OSError):
                with open("files", "a") as note:
                    note.write(f"{workdir}\n")
                since = os.stat("files").st_mtime  # by the clock of the disk
            self._folders[workdir] = (path, since, set())
        self._folders[workdir][2].add(included)

    def report(self) -> list[dict[str, Any]]:
        """For each folder in which something was written: how many files, their size, and the names of some."""
        found = []
        for workdir, (path, since, included) in self._folders.items():
            files, complete = _changed(path, since, included)
            if files:
                files.sort(key=lambda file: -file[2])
                found.append(
                    {
                        "workdir": workdir,
                        "count": len(files),
                        "size": sum(size for _, size, _ in files),
                        "names": [name for name, _, _ in files[:_NAMES]],
                        "complete": complete,
                    }
                )
        return found


def _changed(folder: str, since: float, included: set[str]) -> tuple[list[tuple[str, int, float]], bool]:
    """Files below a folder that were written since then: name, size and time; and whether these are all."""
    found: list[tuple[str, int, float]] = []
    deadline = time.monotonic() + _SECONDS
    for seen, inner in enumerate(_inside(folder)):
        if seen >= _MOST or time.monotonic() > deadline:
            return found, False
        path = os.path.join(folder, inner)
        try:
            about = os.lstat(path)
        except OSError:
            continue
        if not stat.S_ISREG(about.st_mode) or about.st_ctime < since or "__pycache__" in inner:
            continue
        if not any(_same(os.path.join(place, inner), path) for place in included if place):
            found.append((inner, about.st_size, about.st_ctime))
    return found, True
