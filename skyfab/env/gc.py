"""Garbage collection: deletes what was not used for a while from a host's cache folder, and from this machine's cache.

What happens on a host is in skyfab/host/ask/gc.py.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from skyfab._util.cache import cache_folder
from skyfab._util.sizes import counted, readable
from skyfab.errors import HostUnfit, UsageError
from skyfab.inventory.host import Host
from skyfab.session.ask import Question, Reply, only

_HOUR: Final = 60
_DAY: Final = 24 * _HOUR
"""In minutes."""

_WORDS: Final = {
    "envs": "environment",
    "packages": "package",
    "pythons": "Python",
    "bundles": "bundle",
    "trees": "project",
    "blobs": "file",
    "logs": "log",
    "run": "run folder",
    "runs": "run",
    "files": "working folder",
    "drafts": "half-made thing",
    "wheels": "wheel",
    "built": "built wheel",
    "locks": "lock",
    "tools": "tool",
    "hosts": "known host",
}
"""The user's word for the entries of each folder."""


@dataclass(slots=True)
class Swept:
    """What was deleted: how many entries of each kind, and their size."""

    counts: dict[str, int] = field(default_factory=dict)
    size: int = 0
    """Bytes."""
    folders: list[tuple[str, int]] = field(default_factory=list)
    """The deleted working folders: names and bytes."""
    kept_uv: bool = False
    """Whether uv's cache still has the files of deleted environments."""
    dry_run: bool = False
    """Whether nothing was deleted: it is what would be."""

    def add(self, kind: str, count: int, size: int) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + count
        self.size += max(0, size)

    def __str__(self) -> str:
        things = [counted(count, _WORDS[kind]) for kind, count in self.counts.items() if count]
        if not things and not self.size:
            return "nothing to remove"
        verb = "would remove" if self.dry_run else "removed"
        said = f"{verb} {', '.join(things) or 'what uv kept'}: {readable(self.size)}"
        if self.folders:
            said += f" ({', '.join(f'{name} {readable(size)}' for name, size in self.folders)})"
        return f"{said}; uv's cache stays, where environments share its files" if self.kept_uv else said


def _minutes(days: int) -> int:
    """Converts days to minutes; at least an hour, so that what was used in the last hour is always kept."""
    return max(days * _DAY, _HOUR)


def question(days: int, *, dry_run: bool = False) -> Question[Swept]:
    """Has a host delete from its cache what was not used for that many days; with `dry_run`, only look.

    Its answer raises HostUnfit if deleting something fails.
    """

    def parse(host: Host, replies: Iterator[Reply]) -> Swept:
        found = only(replies)
        swept = Swept(dry_run=dry_run, kept_uv=bool(found["kept_uv"]))
        for kind, (count, size) in found["removed"].items():
            if kind in _WORDS:
                swept.add(kind, int(count), int(size))
        swept.folders = [(str(name)[:100], int(size)) for name, size in found["folders"]]
        if found["left"]:
            what = f"{swept}; cannot remove some of its cache: {str(found['left'])[-400:]}"
            raise HostUnfit(what, host=host.name, hint="remove it as the user that it belongs to")
        return swept

    return Question("gc", parse, {"days": days, "dry_run": dry_run})


# ---- the cache of this machine


def sweep_here(days: int, *, dry_run: bool = False) -> Swept:
    """Deletes wheels, locks and tools that this machine stores for hosts and that were not read for that many days.

    With `dry_run` it only looks. Raises UsageError if deleting something fails.
    """
    swept = Swept(dry_run=dry_run)
    now = time.time()
    for kind in ("wheels", "built", "locks", "tools", "pythons", "hosts", "busy"):
        for path in _entries(cache_folder() / kind):
            half = path.name.startswith(".")
            if kind == "pythons" and not path.name.startswith(("cpython-", ".new-")):
                continue  # belongs to this machine's role as a host
            found = [*_all(path)]
            files = [one for one in found if not stat.S_ISDIR(one.st_mode)]
            # of folders only writes count: scanning them, as here, counts as a read
            used = max([0.0, *(one.st_mtime for one in found), *(one.st_atime for one in files)])
            if now - used > 60 * (_DAY if half else _minutes(days)):
                if not dry_run:
                    _remove(path)
                if kind != "busy":
                    swept.add("drafts" if half else kind, 1, sum(one.st_size for one in files))
    return swept


def _entries(folder: Path) -> list[Path]:
    """The entries of a folder, unless it is a link."""
    try:
        return [] if folder.is_symlink() else sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _all(path: Path) -> Iterator[os.stat_result]:
    """The path and everything below it, without following links."""
    try:
        found = path.lstat()
        yield found
        for inner in path.iterdir() if stat.S_ISDIR(found.st_mode) else ():
            yield from _all(inner)
    except FileNotFoundError:
        pass


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        pass  # another process has deleted it
    except OSError as error:
        raise UsageError(f"cannot remove {error.filename or path}: {error.strerror}") from None
