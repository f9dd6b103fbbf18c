"""A host's part in a relay of files: the target of its transfer writes them, and it reads them to pass them on."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from skyfab.files.source import SMALL
from skyfab.host.relay import ENDED, HostRelay, chunks_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skyfab.files.target import Target

_CHANGED = "it was changed"


class FileRelay(HostRelay):
    """Items are large files, or packs of small ones, each of which is one chunk."""

    def __init__(self, target: Target, items: Sequence[list[list[int]]], step: int, keys: tuple[str, str]) -> None:
        """`items` are lists of files: number, size and time. `step` is the size of chunks. Raises OSError."""
        sizes = [sum(size for _, size, _ in files) for files in items]
        super().__init__(chunks_of(sizes, step), keys)
        self._target = target
        self._items = items
        self._drafts: dict[int, int] = {}
        """Descriptors of large files that are incomplete, by the number of the item."""
        self._skipped: set[int] = set()
        """Items that are not sent because their files have changed on the client."""
        self._lock = threading.Lock()
        self.lacks = [(item, self._begun(item)) for item in range(len(items))]
        """Numbers of items, each with how much of it is already there, before `resume` undamaged or not."""
        self._missing = range(len(self._chunks))

    def _begun(self, item: int) -> int:
        """How much an earlier transfer left of an item: whole chunks, except for the last one."""
        if self._is_pack(item) or not self._target.begun(self._items[item][0][0]):
            return 0
        size = self._open(item)
        ends = [end for one, _, end in self._chunks if one == item]
        return max((end for end in ends[:-1] if end <= size), default=0)

    def resume(self) -> list[tuple[int, int]]:
        """Keeps what is there of items, up to the first damaged chunk; all their hashes have come. Returns `lacks`."""
        there = dict.fromkeys(range(len(self._items)), 0)
        for number, (item, start, end) in enumerate(self._chunks):
            if end <= self.lacks[item][1] and start == there[item]:
                data = os.pread(self._drafts[item], end - start, start)
                there[item] = end if self._is_right(number, data) else start
        self.lacks = [*there.items()]
        self._missing = [number for number, (item, start, _) in enumerate(self._chunks) if start >= there[item]]
        return self.lacks

    def _open(self, item: int) -> int:
        """Opens the draft of a large file. Returns its size."""
        draft = self._target.draft(self._items[item][0][0])
        with self._lock:
            self._drafts[item] = os.dup(draft.fd)
        return draft.size

    def _close(self, item: int) -> None:
        with self._lock:
            if item in self._drafts:
                os.close(self._drafts.pop(item))

    def _is_pack(self, item: int) -> bool:
        files = self._items[item]
        return len(files) > 1 or files[0][1] <= SMALL

    # ---- the methods of every relay

    def _keep(self, number: int, chunk: memoryview) -> None:
        item, start, end = self._chunks[number]
        if item in self._skipped:
            return
        if self._is_pack(item):
            self._target.store(self._items[item], chunk)
            return
        ((file, size, _),) = self._items[item]
        if item not in self._drafts:
            self._open(item)
        self._target.piece(file, start, chunk)
        if end == size:
            self._close(item)

    def _skip(self, number: int) -> None:
        item, _, _ = self._chunks[number]
        self._skipped.add(item)
        self._came()

    def _content(self, number: int) -> memoryview | str:
        item, start, end = self._chunks[number]
        if item in self._skipped:
            return _CHANGED
        with self._lock:
            if item in self._drafts:
                return memoryview(os.pread(self._drafts[item], end - start, start))
        if self._is_pack(item):
            return memoryview(b"".join(self._read(file, 0, size) for file, size, _ in self._items[item]))
        return memoryview(self._read(self._items[item][0][0], start, end - start))

    def _read(self, file: int, start: int, size: int) -> bytes:
        """A part of a complete file. If a program has written to it since, the next host notices that."""
        fd = os.open(self._target.place(file), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.pread(fd, size, start)
        finally:
            os.close(fd)

    def commit(self) -> list[int]:
        """Takes no more chunks. Returns the numbers of items that are not complete; their drafts stay."""
        self._leave_source()
        rest = {self._chunks[number][0] for number in self._missing[self._count :]} | self._skipped
        if self._count < len(self._missing):
            self._stop(ENDED)
        for item in rest:
            self._close(item)
            if not self._is_pack(item):
                self._target.leave(self._items[item][0][0])
        return sorted(rest)
