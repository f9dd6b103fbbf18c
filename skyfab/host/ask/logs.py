"""Reads new lines from all logs of a detached run, merged by the times at which they were written."""

from __future__ import annotations

import heapq
import mmap
import os
import re
from bisect import bisect_left, bisect_right

from skyfab.host.ask.runs import listed, run_folder

TYPE_CHECKING = False  # importing `typing` would slow the start
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, BinaryIO, Final

    Cursor = list[Any]
    """How far a log was read: the inode number of the file, the offset in it, and the time of the last line."""
    Line = tuple[float, str, str, Cursor]
    """When it was written, the name of the log, its text, and the cursor after it."""

_NAME: Final = re.compile(r"([0-9]+)\.(out|err)")
"""The name of a log: rank and stream. The previous, rotated file has ``.1`` added."""
_MOST: Final = 512 * 1024
"""Bytes of one answer; in JSON they take up to six times as many."""
_LONGEST: Final = 128 * 1024
"""Bytes of a line; a longer one is split."""
_OVERHEAD: Final = 40
"""Bytes of a line besides its text."""
_RECORD: Final = 32
"""Bytes of a record of host/agent/run_folder.py."""


def logs(
    cache: str,
    *,
    run: str,
    cursors: dict[str, Cursor],
    rest: bool,
    started: float,
    rank: int | None = None,
    tail: int | None = None,
    since: float | None = None,
) -> dict[str, Any]:
    """New `lines`, as rank, stream, text and time; the `cursors` for the next question; and whether there are `more`.

    With `rest` also an incomplete last line. Of logs without a cursor only the last `tail` lines, and those not before
    `since`. Lines whose time is unknown have `started`.
    """
    folder = run_folder(cache, run)
    found = []
    for name in filter(_NAME.fullmatch, listed(f"{folder}/logs")):
        if (rank is None or name.startswith(f"{rank}.")) and (files := _opened(folder, name)):
            cursor = cursors.get(name) or [*_start(files, tail, since), started]
            cursors = {**cursors, name: cursor}
            found.append(_lines(name, files, cursor, rest=rest))
    lines, room = [], _MOST
    for time, name, text, cursor in heapq.merge(*found, key=lambda line: line[0]):
        cursors[name] = cursor
        if since is None or time >= since:
            number, stream = name.split(".")
            lines.append([int(number), stream, text, time])
            room -= len(text.encode()) + _OVERHEAD
        if room < 0:
            break
    return {"lines": lines, "cursors": cursors, "more": room < 0}


class _File:
    """The content of a log file, and of the file that says when it was written."""

    def __init__(self, folder: str, name: str) -> None:
        with open(f"{folder}/logs/{name}", "rb") as file:
            self.inode = os.fstat(file.fileno()).st_ino
            self.data = _mapped(file)
        try:
            with open(f"{folder}/times/{name}", "rb") as file:
                self._times = _mapped(file)
        except OSError:
            self._times = b""
        self._records = range(len(self._times) // _RECORD)
        self._found = (0, 0, 0.0)
        """The offsets between which the last answer of `written` is right, and that answer."""

    def written(self, offset: int) -> float:
        """When what begins at this offset was written; 0 if that is unknown."""
        if not self._found[0] <= offset < self._found[1]:
            place = bisect_right(self._records, offset, key=lambda place: self._record(place)[0])
            begin, time = self._record(place - 1) if place > 0 else (0, 0.0)
            end = self._record(place)[0] if place < len(self._records) else len(self.data)
            self._found = (begin, end, time)
        return self._found[2]

    def since(self, time: float) -> int:
        """Where the line begins in which the output of that time or later begins."""
        place = bisect_left(self._records, time, key=lambda place: self._record(place)[1])
        start = self._record(place)[0] if place < len(self._records) else len(self.data)
        return self.data.rfind(b"\n", 0, start) + 1

    def _record(self, place: int) -> tuple[int, float]:
        end = self._times.find(b"\n", place * _RECORD) + 1  # a full disk may have cut off earlier ones
        try:
            offset, time = self._times[end - _RECORD : end].split()
            return int(offset), int(time) / 1000
        except ValueError:
            return 0, 0.0


def _mapped(file: BinaryIO) -> mmap.mmap | bytes:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.fstat(file.fileno()).st_size else b""


def _opened(folder: str, name: str) -> list[_File]:
    """The files of a log, the rotated one first."""
    while True:
        try:
            paths = [each for each in (f"{name}.1", name) if os.path.exists(f"{folder}/logs/{each}")]
            files = [_File(folder, each) for each in paths]
            if [file.inode for file in files] == [os.stat(f"{folder}/logs/{each}").st_ino for each in paths]:
                return files
        except FileNotFoundError:
            pass  # it was rotated just now


def _start(files: list[_File], tail: int | None, since: float | None) -> tuple[int, int]:
    """The file and the offset at which a reading begins."""
    by_tail = (0, 0) if tail is None else _last_lines(files, tail)
    by_time = (0, 0)
    if since is not None:
        starts = [(number, file.since(since)) for number, file in enumerate(files)]
        by_time = next((start for start in reversed(starts) if start[1] > 0), (0, 0))
    number, offset = max(by_tail, by_time)
    return files[number].inode, offset


def _last_lines(files: list[_File], count: int) -> tuple[int, int]:
    """The number of the file in which the last lines begin, and the offset in it."""
    end = len(files[-1].data)
    if count > 0 and files[-1].data[-1:] == b"\n":
        end -= 1
    for number, file in reversed(list(enumerate(files))):
        while count > 0 and (at := file.data.rfind(b"\n", 0, end)) >= 0:
            end, count = at, count - 1
        if count <= 0:
            return number, min(end + 1, len(file.data))
        end = len(files[number - 1].data)
    return 0, 0


def _lines(name: str, files: list[_File], cursor: Cursor, *, rest: bool) -> Iterator[Line]:
    """The lines after a cursor. A line may begin in the rotated file and end in the next one."""
    inode, offset, time = cursor
    numbers = [file.inode for file in files]
    if inode in numbers:
        files = files[numbers.index(inode) :]
    else:
        offset = 0  # more was written than is kept
    head, begun = b"", 0.0
    for file in files:
        data = file.data
        while offset < len(data):
            end = data.find(b"\n", offset, offset + _LONGEST)
            is_whole = end >= 0 or offset + _LONGEST <= len(data)
            after = end + 1 if end >= 0 else min(offset + _LONGEST, len(data))
            piece = data[offset : end if end >= 0 else after]
            if not head:
                begun = file.written(offset)
            if not is_whole and not (rest and file is files[-1]):
                head += piece
                break
            time = max(time, begun)
            yield time, name, (head + piece).decode(errors="replace"), [file.inode, after, time]
            head, offset = b"", after
        offset = 0
    if head and rest:  # the file that came after it is empty
        time = max(time, begun)
        yield time, name, head.decode(errors="replace"), [files[-1].inode, len(files[-1].data), time]
