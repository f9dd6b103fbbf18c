"""Garbage collection: deletes what was not used for a while from a host's cache folder, and from this machine's cache.

Which files are deleted is in skyfab/host/ask/gc.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from skyfab._util.cache import cache_folder
from skyfab._util.sizes import counted, readable
from skyfab.errors import HostUnfit, UsageError
from skyfab.host.ask.gc import gc_here
from skyfab.inventory.host import Host
from skyfab.session.question import Question, Reply, only

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
    "hub": "model",
    "fetched": "fetched file",
    "compiled": "kernel cache",
    "drafts": "incomplete item",
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
    kept_models: bool = False
    """Whether models, fetched files and kernels stay, because it is not known when they were read."""
    dry_run: bool = False
    """Whether nothing was deleted: it is what would be."""

    def __str__(self) -> str:
        why = "the disk does not record when they are read (noatime); --days=0 removes them"
        return f"{self._removed()}; models and kernels stay: {why}" if self.kept_models else self._removed()

    def _removed(self) -> str:
        things = [counted(count, _WORDS[kind]) for kind, count in self.counts.items() if count]
        if not things and not self.size:
            return "nothing to remove"
        verb = "would remove" if self.dry_run else "removed"
        said = f"{verb} {', '.join(things) or 'unused files of uv'}: {readable(self.size)}"
        if self.folders:
            said += f" ({', '.join(f'{name} {readable(size)}' for name, size in self.folders)})"
        return f"{said}; uv's cache still has the files, which environments share" if self.kept_uv else said


def question(days: int, *, dry_run: bool = False) -> Question[Swept]:
    """Has a host delete from its cache what was not used for that many days; with `dry_run`, only look.

    Its answer raises HostUnfit if deleting something fails.
    """

    def parse(host: Host, replies: Iterator[Reply]) -> Swept:
        swept, left = _parsed(only(replies), dry_run=dry_run)
        if left:
            raise HostUnfit(f"{swept}; {left}", host=host.name, hint="remove it as its owner")
        return swept

    return Question("gc", parse, {"days": days, "dry_run": dry_run})


def sweep_here(days: int, *, dry_run: bool = False) -> Swept:
    """Deletes wheels, locks and tools that this machine stores for hosts and that were not read for that many days.

    With `dry_run` it only looks. Raises UsageError if deleting something fails.
    """
    swept, left = _parsed(gc_here(str(cache_folder()), days=days, dry_run=dry_run), dry_run=dry_run)
    if left:
        raise UsageError(f"{swept}; {left}")
    return swept


def _parsed(found: Mapping[str, Any], *, dry_run: bool) -> tuple[Swept, str]:
    """What was deleted, and what could not be."""
    swept = Swept(dry_run=dry_run, kept_uv=bool(found["kept_uv"]), kept_models=bool(found["kept_models"]))
    for kind, (count, size) in found["removed"].items():
        if kind in _WORDS:
            swept.counts[kind] = int(count)
            swept.size += max(0, int(size))
    swept.folders = [(str(name)[:100], int(size)) for name, size in found["folders"]]
    left = str(found["left"])[-400:]
    return swept, left and f"cannot remove some of its cache: {left}"
