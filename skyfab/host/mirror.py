"""The files of this host that a mirror fetches next: complete ones that it does not have yet, newest first."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import stat
import time
from itertools import accumulate

from skyfab.files.entries import FILE, FOLDER
from skyfab.files.source import ROWS, Source

TYPE_CHECKING = False  # importing `typing` would slow the start of a transfer
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Final

    from skyfab.files.entries import Entry, Skip

    State = tuple[int, ...]

_QUIET: Final = (1.0, 0.4)
"""Seconds without a change after which a file may be complete, during the run and at its end."""
_PASS: Final = 64 << 20
"""Bytes after which the folder is scanned again: a newer file comes before the rest."""


class News:
    """What is new in the files of a mirror, and what has been fetched."""

    def __init__(self) -> None:
        self._taken: dict[bytes, State] = {}
        self._offered: dict[bytes, State] = {}

    def look(self, found: Iterable[tuple[Entry, bytes]], skipped: list[Skip], *, last: bool) -> tuple[Source, int, int]:
        """The next entries, their number, and the number of other files that are changing.

        A file is complete if it does not change and no process of this user has it open for writing. At the end
        (`last`), a file that is open and does not change counts as complete, such as a log.
        """
        new: list[tuple[Entry, bytes, State]] = []
        changing, now = 0, time.time()
        for entry, path in found:
            try:
                about = os.lstat(path)
            except FileNotFoundError:
                continue
            state = () if entry.kind is FOLDER else _state(about)
            if self._taken.get(path) == state:
                continue
            self._taken.pop(path, None)
            if entry.kind is FILE and stat.S_ISLNK(about.st_mode):
                skipped.append((entry.path, "a link to a file outside it"))
            elif entry.kind is FILE and 0 <= now - about.st_ctime < _QUIET[last]:
                changing += 1
            else:
                new.append((entry, path, state))
        held = set() if last else _held({state[:2] for _, _, state in new if state})
        new = sorted((one for one in new if one[2][:2] not in held), key=lambda one: -one[0].time)
        sizes = accumulate(entry.size for entry, _, _ in new[:ROWS])
        del new[1 + sum(size < _PASS for size in sizes) :]
        self._offered = {path: state for _, path, state in new}
        source = Source([(entry, path) for entry, path, _ in new], skipped)
        source.is_same = lambda path: _state(os.lstat(path)) == self._offered[path]
        return source, len(new), changing

    def take(self) -> list[bytes]:
        """What was offered has been fetched. Returns everything that has been fetched, as it was at the last scan.

        A file that had changed before it was read has another state, and is offered again.
        """
        self._taken |= self._offered
        return list(self._taken)


def _state(about: os.stat_result) -> State:
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


def _held(files: set[State]) -> set[State]:
    """Which of these files, by device and inode, a process of this user has open for writing."""
    found = set()
    for folder in glob.iglob("/proc/[0-9]*/fd") if files else ():
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            for fd in os.listdir(folder):
                with contextlib.suppress(OSError):  # closed just now
                    file = _state(os.stat(f"{folder}/{fd}"))[:2]
                    if file in files:
                        with open(f"{folder}info/{fd}") as info:
                            flags = re.search(r"flags:\s*([0-7]+)", info.read())
                        if flags and int(flags[1], 8) & (os.O_WRONLY | os.O_RDWR):
                            found.add(file)
    return found
