"""Reads the logs of a detached run from its hosts, merged by the times at which they were written there."""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from skyfab.inventory.host import Host
from skyfab.session.ask import PASSING, Asker, Question, Reply, only

_NAME: Final = re.compile(r"[0-9]{1,9}\.(?:out|err)(?:\.1)?")
"""The name of a log: rank, stream, ``.1`` for the previous, rotated file."""
_CHUNK: Final = 1024 * 1024
_TOGETHER: Final = 32 * 1024 * 1024
"""Bytes that are held of all logs."""
_BLOCK: Final = 64 * 1024
"""Bytes that are read at once to find a place from the end."""
_RECORD: Final = 32
"""Bytes of a record of host/agent/log_times.py."""


class LogLine(NamedTuple):
    """A line that a rank wrote."""

    rank: int
    stream: str
    """``out`` or ``err``."""
    text: str
    time: float
    """By the host's clock; when the run started, if that is not known."""


@dataclass(frozen=True, slots=True)
class _File:
    """A log as it is listed."""

    name: str
    inode: int
    size: int
    times: int
    """The size of the file that says when it was written."""


class _Cursor:
    """How far a log has been read."""

    def __init__(self, time: float) -> None:
        self.inode = -1
        self.offset = 0
        self.rest = b""
        self.cut = False
        """The reading began inside a line, which is left out."""
        self.time = time
        self.times = _Times()

    def begin(self, file: _File) -> None:
        """Continues in this file; at its beginning, unless it is already the current one."""
        if self.inode != file.inode:
            self.inode, self.offset, self.times = file.inode, 0, _Times()

    def split(self, data: bytes) -> list[tuple[int, bytes]]:
        """The complete lines up to the end of `data`, which comes next, with their offsets in the file."""
        at = self.offset - len(self.rest)
        self.offset += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        found = []
        for line in lines:
            found.append((max(at, 0), line))
            at += len(line) + 1
        if self.cut and found:
            del found[0]
            self.cut = False
        return found


class _Times:
    """The times of one file, read as they are needed."""

    def __init__(self) -> None:
        self._position = 0
        self._records: deque[tuple[int, float]] = deque()

    def at(self, offset: int, before: float, size: int, read: Callable[[int, int], bytes]) -> float:
        """When what begins at this offset was written; not earlier than `before`."""
        while True:
            if not self._records and self._position + _RECORD <= size:
                data = read(self._position, min(_BLOCK, (size - self._position) // _RECORD * _RECORD))
                self._position += len(data)
                self._records += _records(data)
            if not self._records or self._records[0][0] > offset:
                return before
            before = max(before, self._records.popleft()[1])

    def since(self, time: float, size: int, read: Callable[[int, int], bytes]) -> int | None:
        """The offset in the log of what was written at that time or later; None if all was written before."""
        found = None
        for _, offset, written in _backwards(size, read):
            if written < time:
                break
            found = offset
        return found

    def seek(self, start: int, size: int, read: Callable[[int, int], bytes]) -> None:
        """Continues at the record for this offset in the log."""
        self._position = size // _RECORD * _RECORD
        for position, offset, _ in _backwards(size, read):
            self._position = position
            if offset <= start:
                return


def _backwards(size: int, read: Callable[[int, int], bytes]) -> Iterator[tuple[int, int, float]]:
    """Records from the end: for the last minutes, earlier times are not read."""
    end = size // _RECORD * _RECORD
    while end > 0:
        begin = max(0, end - _BLOCK)
        for number, record in reversed(list(enumerate(_records(read(begin, end - begin))))):
            yield begin + number * _RECORD, *record
        end = begin


def _records(data: bytes) -> Iterator[tuple[int, float]]:
    """What a host has sent: anything that is no record is left out."""
    for line in bytes(data).split(b"\n"):
        offset, _, time = line.partition(b" ")
        if len(line) == _RECORD - 1 and offset.isdigit() and time.isdigit():
            yield int(offset), int(time) / 1000


def _listed(_host: Host, replies: Iterator[Reply]) -> dict[str, _File]:
    found = [_File(str(name), int(inode), int(size), int(times)) for name, inode, size, times in only(replies)]
    return {file.name: file for file in found if _NAME.fullmatch(file.name) and min(file.size, file.times) >= 0}


def content_of(
    run: str, name: str, *, start: int = 0, count: int | None = None, inode: int | None = None
) -> Question[bytearray | None]:
    """Asks for a file of a run, or a part of it; None if it is not there, or no longer the log with that `inode`."""

    def parse(_host: Host, replies: Iterator[Reply]) -> bytearray | None:
        if next(replies).value is not True:
            return None
        content = bytearray()
        for reply in replies:
            content += reply.data
            if count is not None and len(content) > count:
                raise ValueError(f"more than the {count} bytes that were asked for")
        return content

    return Question("read", parse, {"run": run, "name": name, "start": start, "count": count, "inode": inode})


class LogReader:
    """Reads new lines of all logs of a run, again and again."""

    def __init__(
        self,
        asker: Asker,
        run: str,
        *,
        started: float = 0.0,
        rank: int | None = None,
        tail: int | None = None,
        since: float | None = None,
    ) -> None:
        """Of one `rank` only, if it is given; at first only the last `tail` lines, and those not before `since`."""
        self._asker = asker
        self._run = run
        self._started = started
        self._rank = rank
        self._tail = tail
        self._since = since
        self._is_first = True
        self._cursors: dict[tuple[str, str], _Cursor] = {}
        self._chunk = _CHUNK
        self.complete = True
        """The last call of `new` has reached all hosts."""

    def new(self, *, rest: bool, patient: bool = False) -> Iterator[LogLine]:
        """Lines that were added since the last call; with `rest` also an incomplete last line.

        If `patient`, a host that cannot be reached now is left out, and its lines come with a later call.
        """
        listed = self._asker.ask(Question("logs", _listed, {"run": self._run}))
        self.complete = all(outcome.error is None for outcome in listed)
        if not patient:
            for outcome in listed:
                outcome.get()
        logs = [
            self._of_log(outcome.host, name, files, rest=rest, patient=patient)
            for outcome in listed
            if (files := outcome.answer)
            for name in sorted(name for name in files if not name.endswith(".1"))
            if self._rank is None or int(name.partition(".")[0]) == self._rank
        ]
        self._chunk = max(_BLOCK, min(_CHUNK, _TOGETHER // max(1, len(logs))))
        lines: Iterator[LogLine] = heapq.merge(*logs, key=lambda line: line.time)
        if self._since is not None:
            since = self._since
            lines = (line for line in lines if line.time >= since)
        if self._tail is not None and self._is_first:
            lines = iter(deque(lines, maxlen=self._tail))
        self._is_first = False
        yield from lines

    def _of_log(
        self, host: Host, name: str, files: dict[str, _File], *, rest: bool, patient: bool
    ) -> Iterator[LogLine]:
        """New lines of one log. While it is suspended, other logs of the host are read over the same connection."""
        rank, stream = name.split(".")
        is_new = (host.name, name) not in self._cursors
        cursor = self._cursors.setdefault((host.name, name), _Cursor(self._started))
        unread = [files[each] for each in (f"{name}.1", name) if each in files]
        if cursor.inode == files[name].inode:
            unread = [files[name]]
        elif cursor.inode not in [file.inode for file in unread]:  # more was written than is kept
            cursor.rest = b""
        try:
            if is_new and (self._tail is not None or self._since is not None):
                unread = self._seek(host, cursor, unread)
            for file in unread:
                cursor.begin(file)
                while cursor.offset < file.size:
                    data = self._read(host, file, "logs", cursor.offset, min(self._chunk, file.size - cursor.offset))
                    for offset, line in cursor.split(data):
                        cursor.time = self._time(host, file, cursor, offset)
                        yield LogLine(int(rank), stream, line.decode(errors="replace"), cursor.time)
            if rest and cursor.rest and not cursor.cut:
                cursor.time = self._time(host, files[name], cursor, max(0, cursor.offset - len(cursor.rest)))
                text, cursor.rest = cursor.rest.decode(errors="replace"), b""
                yield LogLine(int(rank), stream, text, cursor.time)
        except FileNotFoundError:  # the log was rotated just now: the next call continues with the new file
            return
        except PASSING:
            if not patient:
                raise
            self.complete = False

    def _time(self, host: Host, file: _File, cursor: _Cursor, offset: int) -> float:
        return cursor.times.at(offset, cursor.time, file.times, lambda *place: self._read(host, file, "times", *place))

    def _read(self, host: Host, file: _File, folder: str, start: int, count: int) -> bytes:
        """Raises FileNotFoundError if the log has another file by now."""
        name, inode = f"{folder}/{file.name}", file.inode
        found = self._asker.ask_one(content_of(self._run, name, start=start, count=count, inode=inode), host)
        if not found:  # or it is shorter than it was said to be
            raise FileNotFoundError(name)
        return bytes(found)

    # ---- the last lines only

    def _seek(self, host: Host, cursor: _Cursor, files: list[_File]) -> list[_File]:
        """Moves the cursor to the first line that is wanted; returns the files to read from there."""
        missing = self._tail
        for number, file in reversed(list(enumerate(files))):
            times, start = _Times(), 0

            def read(at: int, count: int, file: _File = file) -> bytes:
                return self._read(host, file, "times", at, count)

            if self._since is not None:
                found = times.since(self._since, file.times, read)
                start = file.size if found is None else found
            if missing is not None:
                first, lines = self._last_lines(host, file, missing) if missing > 0 else (file.size, 0)
                missing -= lines
                start = max(start, first)
            if start > 0 or number == 0:
                times.seek(start, file.times, read)
                cursor.inode, cursor.times = file.inode, times
                cursor.offset, cursor.cut = max(0, start - 1), start > 0
                return files[number:]
        return files

    def _last_lines(self, host: Host, file: _File, count: int) -> tuple[int, int]:
        """Where the last lines of a file begin, and how many these are."""
        end, found, last = file.size, 0, file.size
        while end > 0:
            begin = max(0, end - _BLOCK)
            data = self._read(host, file, "logs", begin, end - begin)
            for at in range(len(data) - 1, -1, -1):
                if data[at] == 10 and begin + at + 1 < file.size:
                    found, last = found + 1, begin + at + 1
                    if found == count:
                        return last, found
            end = begin
        return 0, found + 1
