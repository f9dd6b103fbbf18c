"""`Source`: where the files of a transfer are read."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import stat
import time
from fnmatch import fnmatchcase

from skyfab.files.entries import MOST_ENTRIES, Entry, text, walk, why_not_followed

TYPE_CHECKING = False  # importing `typing` would slow the start of a transfer
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
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
_RECENT: Final = 1_000_000_000
"""Nanoseconds for which the time of a file may stay the same while it changes: a write sets it when it begins."""
_TAKEN: Final = "another match has this name"
NO_MATCH: Final = "no match"
"""Why a path or pattern that matches nothing is skipped."""
GONE: Final = -1
"""In place of the size of a file that can no longer be read as it was listed."""


class Source:
    """Files and folders, in the order in which they are listed. A file is asked for by its number in that order."""

    def __init__(self, found: Iterable[tuple[Entry, bytes]], skipped: list[Skip]) -> None:
        self._found = iter(found)
        self._skipped = skipped
        self.is_same: Callable[[bytes], bool] = lambda path: True
        """Asked after a file was opened or read: one that is not the same anymore counts as removed."""
        self._held: tuple[int, int, tuple[int, int]] | None = None
        """The large file that is being sent: its number, a descriptor, and its size and time when it was opened."""
        self.paths: list[bytes] = []
        self._large: dict[int, tuple[int, int]] = {}
        """The size and time of each large file when it was listed."""

    def rows(self) -> tuple[list[Row], list[tuple[str, str]]]:
        """The next entries, and what was left out meanwhile. Empty: there are no more."""
        rows: list[Row] = []
        for entry, path in self._found:
            if len(self.paths) >= MOST_ENTRIES:
                raise OSError(errno.E2BIG, f"more than {MOST_ENTRIES} files and folders")
            if entry.size > SMALL:
                self._large[len(self.paths)] = (entry.size, entry.time)
            self.paths.append(path)
            rows.append(entry.row)
            if len(rows) == ROWS:
                break
        skipped = [(text(path), why) for path, why in self._skipped]
        self._skipped.clear()
        return rows, skipped

    def digest(self, number: int, size: int) -> str:
        """The sha256 of the first `size` bytes of a file; empty if it has fewer. A large one stays open for `piece`."""
        try:
            if number in self._large:
                self._hold(number)
                return "" if self._held is None else digest_of(self._held[1], size)
            with self._open(number) as (fd, _):
                return digest_of(fd, size)
        except OSError:
            return ""

    def _hold(self, number: int) -> None:
        """Opens a large file, which is then read even if another one gets its name meanwhile.

        Not if it has changed since it was listed: another file may have its name, of which only a part would be sent.
        """
        if self._held is None or self._held[0] != number:
            state = self.reopen(number)
            if state != self._large.get(number, state):
                self.close()

    def reopen(self, number: int) -> tuple[int, int]:
        """Opens a large file as it is now. Returns its size, which is `GONE` without it, and its time."""
        self.close()
        try:
            fd = os.open(self.paths[number], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._held = (number, fd, _state(fd))
            if stat.S_ISREG(os.fstat(fd).st_mode) and self.is_same(self.paths[number]):
                return self._held[2]
            self.close()  # a folder or a named pipe has taken its place, or a link to another file
        except OSError:
            self.close()
        return GONE, 0

    def close(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            os.close(held[1])

    def pack(self, numbers: Sequence[int], most: int) -> tuple[list[list[int]], bytes]:
        """Small files as they are now, one after another: number, size and time of each; and the content.

        A file that is gone or changes again and again, or has grown so that all together have more than `most` bytes,
        has the size `GONE`.
        """
        found: list[list[int]] = []
        contents: list[bytes] = []
        room = most
        for number in numbers:
            try:
                content, modified = self._version(number)
            except OSError:
                found.append([number, GONE, 0])
                continue
            if len(content) > min(room, SMALL):
                found.append([number, GONE, 0])
            else:
                room -= len(content)
                found.append([number, len(content), modified])
                contents.append(content)
        return found, b"".join(contents)  # which copies nothing if there is one

    def _version(self, number: int) -> tuple[bytes, int]:
        """The content of a small file, and its time; of a large one, the first `SMALL` + 1 bytes.

        If it changes while it is read, it is read once more. Raises FileNotFoundError if it changes then, too.
        """
        for _ in range(2):
            with self._open(number) as (fd, about):
                size, modified = about.st_size, about.st_mtime_ns
                content = os.read(fd, min(size, SMALL) + 1)
                while len(content) not in (size, SMALL + 1) and (more := os.read(fd, SMALL + 1 - len(content))):
                    content += more  # it has grown; or it is one of /proc, which have no size
                is_settled = len(content) > size == 0 or time.time_ns() - modified > _RECENT
                is_same = _state(fd) == (size, modified)
                if is_same and is_settled:
                    return content, modified
                is_whole = (is_same or size > 0) and len(content) >= size
                if is_whole and os.pread(fd, len(content) or 1, 0) == content:  # lines may have been appended
                    return content, modified
        raise FileNotFoundError

    def piece(self, number: int, at: int, size: int) -> tuple[bool, bytes]:
        """A part of a large file, and whether it has changed since it was opened: at the latest for its first part."""
        if at == 0:
            self._hold(number)
        if self._held is None or self._held[0] != number:
            return True, b""
        _, fd, state = self._held
        try:
            data = os.pread(fd, size, at)
            while 0 < len(data) < size and (more := os.pread(fd, size - len(data), at + len(data))):
                data += more
            return len(data) < size or _state(fd) != state, data
        except OSError:
            return True, b""

    @contextlib.contextmanager
    def _open(self, number: int) -> Iterator[tuple[int, os.stat_result]]:
        with opened(self.paths[number], os.O_RDONLY | os.O_NONBLOCK) as fd:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode):  # replaced since it was listed
                raise FileNotFoundError
            yield fd, about
            if not self.is_same(self.paths[number]):
                raise FileNotFoundError


def _state(fd: int) -> tuple[int, int]:
    about = os.fstat(fd)
    return about.st_size, about.st_mtime_ns


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

    A relative path keeps its place; of another one, only the last part of its name is kept. The first of several
    matches that would have the same place gets it. Patterns without a match are in `skipped`, for `NO_MATCH`.
    """
    seen: set[bytes] = set()
    places: set[bytes] = set()

    def is_new(child: os.DirEntry[bytes], path: bytes) -> bool:
        if path in places and os.path.normpath(child.path) not in seen:
            skipped.append((path, _TAKEN))
        return path not in places

    for pattern in patterns:
        path = os.path.expanduser(pattern)
        is_named = os.path.lexists(path)
        found = [path] if is_named else sorted(glob.iglob(path, recursive=True))
        if not found:
            skipped.append((pattern, NO_MATCH))
        for match in found:
            clean = os.path.normpath(match)
            outside = clean.startswith(b"/") or clean.split(b"/")[0] == b".."
            kept = os.path.basename(clean) if outside else clean
            place = b"" if kept in (b".", b"..") else kept
            if not seen.isdisjoint(and_above(clean)) or not os.path.lexists(match):  # glob yields d/ for d/** unseen
                continue
            if not places.isdisjoint(and_above(place)):
                skipped.append((clean, _TAKEN))
                continue
            seen.add(clean)
            if not is_named and (why := why_not_followed(match, place)):
                skipped.append((place, why))
                continue
            places.add(place)
            try:
                yield from walk(match, place, skipped, is_new)
            except OSError:
                if is_named:
                    raise
                skipped.append((place, "not readable"))


def expected(patterns: Sequence[bytes]) -> Callable[[bytes], bool]:
    """Whether `matching` lists a path for these patterns if its machine has it. A hostile one may list anything."""
    wanted = [os.path.normpath(pattern).split(b"/") for pattern in patterns]
    for words in wanted:
        if words[0] in (b"", b"..") or words[0].startswith(b"~"):
            while words[-1] == b"**":  # also matches the folder itself
                words.pop()
            del words[:-1]
    if any(words[-1] in (b"", b".", b"..") for words in wanted):  # everything, as its source has it
        return lambda path: True
    for words in wanted:
        if words == [b"**"] or words[0].startswith(b"~"):  # only its source knows the name of a home folder
            words[0] = b"*"
    return lambda path: any(_begins(path.split(b"/"), words) for words in wanted)


def _begins(path: Sequence[bytes], pattern: Sequence[bytes]) -> bool:
    """Whether a pattern matches a path, or a folder above it."""
    if not pattern:
        return True
    if pattern[0] == b"**" and _begins(path, pattern[1:]):
        return True
    if not path or (path[0].startswith(b".") and not pattern[0].startswith(b".")):  # as `glob`
        return False
    if pattern[0] == b"**":
        return _begins(path[1:], pattern)
    return (path[0] == pattern[0] or fnmatchcase(path[0], pattern[0])) and _begins(path[1:], pattern[1:])


def and_above(path: bytes) -> list[bytes]:
    """The path and the folders that it is in."""
    words = path.split(b"/")
    return [b"/".join(words[:count]) for count in range(1, len(words) + 1)]
