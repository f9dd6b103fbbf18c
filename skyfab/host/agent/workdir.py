"""The working folder of a host's workers: creates it, copies included files into it, reports new files.

A project's folder in the cache, or a path that the user has given, persists when the pool closes. The files that the
user included are copied into it, and other files that were written there can be listed.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time

from skyfab.errors import ProtocolError

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any, Final

INCLUDED: Final = "files"
"""The folder of a project's tree with the files that are copied into the working folder."""
_MOST: Final = 20_000
_SECONDS: Final = 0.5
"""Limits for the scan of a working folder, files and seconds: it may contain any number of files."""
_NAMES: Final = 3


def place(workdir: str, cache: str) -> str:
    """The path of a working folder: given by the user, or a project's folder in the cache. Empty: the pool's own.

    Raises FileNotFoundError for an unknown user, ProtocolError for an invalid name.
    """
    if not workdir:
        return ""
    if workdir.startswith(("/", "~")):
        found = os.path.expanduser(workdir)
        if not found.startswith("/"):
            raise FileNotFoundError(f"the working folder {workdir}: no such user")
        return found
    if not workdir.replace("-", "").replace("_", "").replace(".", "").isalnum() or workdir.startswith("."):
        raise ProtocolError(f"not the name of a working folder: {workdir!r:.80}")
    return os.path.join(cache, "files", workdir)


def enter(folder: str, cache: str, included: str) -> None:
    """Creates the folder, changes to it, and copies the included files into it. Raises OSError."""
    if folder:
        kept = os.path.join(cache, "files")
        if os.path.dirname(folder) == kept:
            for part in (kept, folder):
                os.makedirs(part, mode=0o700, exist_ok=True)
            os.utime(folder)  # marks it as in use, for `skyfab gc`
        else:
            os.makedirs(folder, exist_ok=True)
        os.chdir(folder)
    for inner in _inside(included) if included else ():
        _lay_out(os.path.join(included, inner), inner)


def _lay_out(source: str, target: str) -> None:
    """Copies a file, unless it is already there. Several processes may do so at once."""
    import shutil  # imported late: few pools include files

    if _same(source, target):
        return
    folder = os.path.dirname(target)
    if folder:
        os.makedirs(folder, exist_ok=True)
    draft = os.path.join(folder, f".{os.path.basename(target)}.{os.getpid()}.new")
    try:
        shutil.copy2(source, draft)
        os.replace(draft, target)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def _same(source: str, target: str) -> bool:
    """Whether the target is a copy of the source: by size and modification time, or else by content."""
    import filecmp

    with contextlib.suppress(OSError):
        return filecmp.cmp(source, target)
    return False


def _inside(folder: str) -> Iterator[str]:
    """The paths of all files below a folder, relative to it."""
    for path, _, names in os.walk(folder):
        for name in names:
            yield os.path.relpath(os.path.join(path, name), folder)


class Written:
    """Tracks which files processes write in persistent working folders while a pool is open."""

    def __init__(self) -> None:
        self._folders: dict[str, tuple[str, float, set[str]]] = {}
        """For each working folder, by the client's name: its path, since when, and the folders of included files."""
        self._noted: set[str] = set()

    def begin(self, workdir: str, path: str, included: str, *, reported: bool = True) -> None:
        """A process is about to start in this working folder. If not `reported`, it is one that transfers files.

        Notes it in the current directory, which is the pool's run folder: there gc looks for what is in use.
        """
        if workdir not in self._noted:
            with contextlib.suppress(OSError), open("files", "a") as note:
                note.write(f"{workdir}\n")
            self._noted.add(workdir)
        if not reported:
            return
        if workdir not in self._folders:
            self._folders[workdir] = (path, _now(), set())
        self._folders[workdir][2].add(included)

    def report(self) -> list[dict[str, Any]]:
        """For each directory with new files: how many, their total size, names of the newest, what all are in."""
        found = []
        fetched = _fetched()
        for workdir, (path, since, included) in self._folders.items():
            files, complete = _changed(path, since, included, fetched)
            if files:
                files.sort(key=lambda file: -file[2])
                found.append(
                    {
                        "workdir": workdir,
                        "count": len(files),
                        "size": sum(size for _, size, _ in files),
                        "names": [name for name, _, _ in files[:_NAMES]],
                        "common": os.path.commonpath([name for name, _, _ in files]),
                        "complete": complete,
                    }
                )
        return found


def _now() -> float:
    """The time by the clock of the file system, in the current folder."""
    with contextlib.suppress(OSError):
        os.utime("files")
        return os.stat("files").st_mtime
    return time.time()


def note_fetched(name: str, paths: Iterable[bytes], run: str) -> None:
    """Notes in the pool's run folder that these files were fetched: they are reported only if they are written again.

    The name of the note begins with ``fetched.``; it replaces an earlier one.
    """
    with contextlib.suppress(OSError), open(os.path.join(run, name), "wb") as note:
        note.write(b"\0".join(map(os.path.realpath, paths)))


def _fetched() -> dict[str, float]:
    """The files that were fetched, and when, by the notes in the current directory."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir():
            if name.startswith("fetched."):
                with open(name, "rb") as note:
                    paths = note.read().split(b"\0")
                found |= dict.fromkeys(map(os.fsdecode, paths), os.stat(name).st_mtime)
    return found


def _changed(
    folder: str, since: float, included: set[str], fetched: Mapping[str, float]
) -> tuple[list[tuple[str, int, float]], bool]:
    """Files below a folder that were written since then (name, size and time), and whether the list is complete.

    Those that were `fetched` since they were written are left out.
    """
    found: list[tuple[str, int, float]] = []
    folder = os.path.realpath(folder)
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
        if about.st_ctime <= fetched.get(path, 0.0):
            continue
        if not any(_same(os.path.join(place, inner), path) for place in included if place):
            found.append((inner, about.st_size, about.st_ctime))
    return found, True
