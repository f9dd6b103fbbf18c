"""`Source`: where the files of a transfer are read."""

from __future__ import annotations

import contextlib
import glob
import os
import stat

from skyfab.files.entries import MOST_ENTRIES, Entry, text, walk

TYPE_CHECKING = False  # importing `typing` would slow the start of a transfer
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Final

    from skyfab.files.entries import Row, Skip

ROWS: Final = 2000
"""Entries of one reply."""
SMALL: Final = 1024 * 1024 - 4096
"""Files of up to this size are read and written as a whole, many in one message.

Messages of 1 MiB and more are received into memory that is newly mapped for each.
"""
PIECE: Final = SMALL
"""Bytes of a larger file that are read and written at a time."""
GONE: Final = -1
"""In place of the size of a file that can no longer be read as it was listed."""


class Source:
    """Files and folders, in the order in which they are listed. A file is asked for by its number in that order."""

    def __init__(self, found: Iterable[tuple[Entry, bytes]], skipped: list[Skip]) -> None:
        self._found = iter(found)
        self._skipped = skipped
        self.paths: list[bytes] = []

    def rows(self) -> tuple[list[Row], list[tuple[str, str]]]:
        """The next entries, and what was left out meanwhile. Empty: there are no more."""
        rows: list[Row] = []
        for entry, path in self._found:
            if len(self.paths) >= MOST_ENTRIES:
                raise OSError(7, f"more than {MOST_ENTRIES} files and folders")
            self.paths.append(path)
            rows.append(entry.row)
            if len(rows) == ROWS:
                break
        skipped = [(text(path), why) for path, why in self._skipped]
        self._skipped.clear()
        return rows, skipped

    def digest(self, number: int, size: int) -> str:
        """The sha256 of the first `size` bytes of a file; empty if it has fewer."""
        with self._open(number) as (fd, _):
            return digest_of(fd, size)

    def pack(self, numbers: Sequence[int], most: int) -> tuple[list[list[int]], bytes]:
        """Small files as they are now, one after another: number, size and time of each; and the content.

        A file that is gone, or has grown so that all together have more than `most` bytes, has the size `GONE`.
        """
        found: list[list[int]] = []
        contents: list[bytes] = []
        room = most
        for number in numbers:
            try:
                with self._open(number) as (fd, about):
                    content = os.read(fd, min(about.st_size, SMALL) + 1)
                    if len(content) > about.st_size:  # it has grown; or it is one of /proc, which have no size
                        while len(content) <= SMALL and (more := os.read(fd, SMALL + 1 - len(content))):
                            content += more
            except FileNotFoundError:
                found.append([number, GONE, 0])
                continue
            if len(content) > min(room, SMALL):
                found.append([number, GONE, 0])
            else:
                room -= len(content)
                found.append([number, len(content), about.st_mtime_ns])
                contents.append(content)
        data = contents[0] if len(contents) == 1 else b"".join(contents)
        return found, data

    def piece(self, number: int, at: int, size: int) -> tuple[bytes]:
        """A part of a large file."""
        with self._open(number) as (fd, _):
            data = os.pread(fd, size, at)
            while 0 < len(data) < size and (more := os.pread(fd, size - len(data), at + len(data))):
                data += more
        if len(data) < size:
            raise OSError(5, "it was truncated while it was read", self.paths[number])
        return (data,)

    @contextlib.contextmanager
    def _open(self, number: int) -> Iterator[tuple[int, os.stat_result]]:
        with opened(self.paths[number], os.O_RDONLY | os.O_NONBLOCK) as fd:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode):  # replaced since it was listed
                raise FileNotFoundError(2, "no longer a file", self.paths[number])
            yield fd, about


@contextlib.contextmanager
def opened(path: bytes, flags: int, mode: int = 0, dir_fd: int | None = None) -> Iterator[int]:
    """A descriptor of a file, which is closed at the end of the block."""
    fd = os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def digest_of(fd: int, size: int) -> str:
    """The sha256 of the first `size` bytes of an open file; empty if it has fewer."""
    import hashlib

    digest = hashlib.sha256()
    at = 0
    while at < size:
        data = os.pread(fd, min(PIECE, size - at), at)
        if not data:
            return ""
        digest.update(data)
        at += len(data)
    return digest.hexdigest()


def matching(patterns: Sequence[bytes], skipped: list[Skip]) -> Iterator[tuple[Entry, bytes]]:
    """What these paths and patterns mean on this machine, relative to the current folder.

    A relative path keeps its place; of another one, only the last part of its name is kept.
    """
    seen: set[bytes] = set()
    for pattern in patterns:
        path = os.path.expanduser(pattern)
        for match in [path] if os.path.lexists(path) else sorted(glob.iglob(path, recursive=True)):
            clean = os.path.normpath(match)
            outside = clean.startswith(b"/") or clean.split(b"/")[0] == b".."
            place = b"" if clean == b"." else os.path.basename(clean) if outside else clean
            if not seen.isdisjoint(_and_above(clean)):
                continue
            seen.add(clean)
            yield from walk(match, place, skipped)


def _and_above(path: bytes) -> list[bytes]:
    """The path and the folders that it is in."""
    words = path.split(b"/")
    return [b"/".join(words[:count]) for count in range(1, len(words) + 1)]
