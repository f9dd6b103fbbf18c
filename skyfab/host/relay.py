"""The worker of a relay on one host: takes chunks from a neighbor or the client, and passes them on while they arrive.

Items are divided into chunks, which arrive in the order of their numbers and are checked by their hashes. So one number
describes what a host has: that of the first chunk that it lacks.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import tempfile
import threading
from typing import TYPE_CHECKING, Final

from skyfab.context import own_stores
from skyfab.files.source import SMALL
from skyfab.host.agent.store import is_intact, map_file, mark_used, seal
from skyfab.host.channel import Channel, ChannelBroken, NotSent
from skyfab.protocol.blobs import check_name, name_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skyfab.files.target import Target
    from skyfab.protocol.frames import Buffer

DAMAGED, BROKEN, ENDED = "damaged", "broken", "ended"
"""Why a host gets no more chunks: the last one was damaged, the connection has ended, or the relay has ended."""
HASH: Final = 32
"""Bytes of a chunk's hash."""
_MIB: Final = 1 << 20
_NEAR: Final = 3.0
"""Seconds for a connection to another host. Short, because a transfer waits for it even if no host can be reached."""
_AHEAD: Final = 3
"""Chunks that are requested ahead, so that the sender never waits for a request."""


def step_of(size: int) -> int:
    """The size of chunks, for the size of all items together: 1 to 4 MiB."""
    return max(_MIB, min(4 * _MIB, size // 256)) & -4096


def chunks_of(sizes: Sequence[int], step: int = 0) -> list[tuple[int, int, int]]:
    """The chunks of items of these sizes: the item's number, and where the chunk begins and ends in it.

    The last chunk of an item may be smaller.
    """
    step = step or step_of(sum(sizes))
    return [(item, start, min(start + step, size)) for item, size in enumerate(sizes) for start in range(0, size, step)]


def hash_of(chunk: Buffer) -> bytes:
    """Not sha256, which takes twice as long on processors without instructions for it."""
    return hashlib.blake2b(chunk, digest_size=HASH).digest()


class HostRelay:
    """One host of a relay: what it has, its source for the rest, and the hosts that take chunks from it.

    The client sends the hashes of chunks, while it computes them: a chunk of another host may have to wait for its own.
    """

    def __init__(self, chunks: Sequence[tuple[int, int, int]], keys: tuple[str, str]) -> None:
        """`keys` are the certificate and key of channels."""
        self._chunks = chunks
        self._memory = memoryview(bytearray(max((end - start for _, start, end in chunks), default=0)))
        """For the chunk that is being received."""
        self._hashes: dict[int, bytes] = {}
        self._keys = keys
        self._changed = threading.Condition()
        self._source: tuple[Channel, threading.Thread] | None = None
        self._problem = ""
        self._error: OSError | None = None
        self._missing: Sequence[int] = ()
        self._count = 0
        """How many of the missing ones have arrived."""
        self._needs_hash = False
        """A chunk has arrived whose hash has not."""
        atexit.register(self.close)

    # ---- items

    def _keep(self, number: int, chunk: memoryview) -> None:
        """Stores a chunk that has arrived undamaged. Raises OSError."""

    def _content(self, number: int) -> memoryview | str:
        """A chunk that has arrived, or why it is missing."""
        raise NotImplementedError

    def _skip(self, number: int) -> None:
        """The source does not have a chunk."""
        raise ChannelBroken("it has nothing to send")

    @property
    def _at(self) -> int:
        """The first chunk that it lacks."""
        return self._missing[self._count] if self._count < len(self._missing) else len(self._chunks)

    # ---- receiving

    def connect(self, peer: str, endpoints: Sequence[tuple[str, int]]) -> bool:
        """Takes chunks from another host from now on. Returns False if it cannot be reached."""
        self._leave_source()
        channel = Channel(peer, *self._keys)
        if not channel.connect(endpoints, _NEAR):
            channel.close()
            return False
        thread = threading.Thread(target=self._pull, args=(channel,), daemon=True)
        self._source = channel, thread
        thread.start()
        return True

    def _leave_source(self) -> None:
        if self._source is not None:
            channel, thread = self._source
            channel.close()
            self._stop(BROKEN)
            thread.join()  # it writes no more
        self._source, self._problem = None, ""

    def _pull(self, channel: Channel) -> None:
        try:
            while wanted := self._missing[self._count : self._count + _AHEAD]:
                for number in wanted:
                    channel.ask(number)
                _, start, end = self._chunks[wanted[0]]
                area = self._memory[: end - start]
                try:
                    channel.receive(wanted[0], area)
                except NotSent:
                    self._skip(wanted[0])
                    continue
                if not (self._await_hash(wanted[0]) and self._check(wanted[0], area)):
                    break
        except ChannelBroken:
            self._stop(BROKEN)
        channel.close()

    def _await_hash(self, number: int) -> bool:
        """Waits for the hash of a chunk that has arrived. Returns False if the host leaves its source before."""
        with self._changed:
            while number not in self._hashes and not self._problem:
                self._needs_hash = True
                self._changed.notify_all()
                self._changed.wait()
            self._needs_hash = False
            return number in self._hashes

    def _check(self, number: int, chunk: memoryview) -> bool:
        """Accepts a chunk if it matches its hash."""
        if not self._is_right(number, chunk):
            self._stop(DAMAGED)
            return False
        try:
            self._keep(number, chunk)
        except OSError as error:
            self._error = error
            self._stop(BROKEN)
            return False
        self._came()
        return True

    def _is_right(self, number: int, chunk: Buffer) -> bool:
        return hash_of(chunk) == self._hashes.get(number)

    def _came(self) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def _stop(self, problem: str) -> None:
        with self._changed:
            self._problem = problem
            self._changed.notify_all()

    def chunk(self, number: int, checksum: bytes, data: memoryview) -> tuple[int, str, int]:
        """Takes a chunk from the client if it is the next one. Without data, the client does not have it."""
        self._leave_source()
        self._learn(number, checksum)
        if number == self._at and not data:
            self._skip(number)
        elif number == self._at:
            self._check(number, data)
        return self.look(0, 0, b"")

    def look(self, seconds: float, first: int, hashes: bytes) -> tuple[int, str, int]:
        """The first chunk that it lacks, why it gets no more, and how many bytes its source has sent.

        Takes the hashes of chunks from `first` on. Waits until it has all chunks, gets no more or needs further hashes,
        or for some time. Raises OSError if it could not write a chunk.
        """
        self._learn(first, hashes)
        with self._changed:
            self._changed.wait_for(lambda: self._problem or self._needs_hash or self._at == len(self._chunks), seconds)
            if self._error is not None:
                raise self._error
            return self._at, self._problem, self._source[0].received if self._source is not None else 0

    def _learn(self, first: int, hashes: bytes) -> None:
        with self._changed:
            for place in range(0, len(hashes), HASH):
                self._hashes[first + place // HASH] = hashes[place : place + HASH]
            if hashes:
                self._needs_hash = False
            self._changed.notify_all()

    # ---- sending

    def listen(self, peer: str, addresses: Sequence[str]) -> list[int]:
        """Listens for a host that takes chunks from here. Returns the port at each address; 0 where there is none."""
        channel = Channel(peer, *self._keys)
        ports = channel.listen(addresses)
        channel.serve(self._next)
        return ports

    def _next(self, number: int) -> memoryview | str:
        """Waits for a chunk that another host asks for."""
        if not 0 <= number < len(self._chunks):
            raise ConnectionError("no such chunk")
        with self._changed:
            self._changed.wait_for(lambda: number < self._at or self._problem == ENDED)
        if number >= self._at:
            raise ConnectionError("closed")
        return self._content(number)

    def close(self) -> None:
        """Ends everything that waits."""
        self._stop(ENDED)


class StoreRelay(HostRelay):
    """Items are content of the host's store, named by its sha256. New ones are written into drafts."""

    def __init__(self, items: Sequence[tuple[str, int]], keep: bool, keys: tuple[str, str]) -> None:
        """`items` are names and sizes. Those that the store lacks get drafts of their full size. Raises OSError.

        With `keep` they are stored in the cache, else with the pool.
        """
        super().__init__(chunks_of([size for _, size in items]), keys)
        self._names = [check_name(name) for name, _ in items]
        self._folder = own_stores()[1 if keep else 0]
        self.drafts: dict[int, str] = {}
        """Paths of drafts for the items that the store lacks, by the number of the item."""
        self._fds: dict[int, int] = {}
        """Their descriptors. A memory map would cost a page fault for each 4 KiB written."""
        self._contents: list[memoryview] = []
        for number, (name, size) in enumerate(items):
            found = _found(name, size)
            self._contents.append(self._draft(number, name, size) if found is None else found)
        self._missing = [number for number, (item, _, _) in enumerate(self._chunks) if item in self.drafts]

    @property
    def lacks(self) -> list[tuple[int, int]]:
        """Numbers of items, each with how much of it is already there."""
        return [(item, 0) for item in sorted(self.drafts)]

    def _draft(self, number: int, name: str, size: int) -> memoryview:
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        fd, self.drafts[number] = tempfile.mkstemp(prefix=f".{name[:16]}-", dir=self._folder)
        self._fds[number] = fd
        try:
            if hasattr(os, "posix_fallocate") and size:  # a full disk fails now, not in the middle
                os.posix_fallocate(fd, 0, size)
            os.truncate(fd, size)
            return map_file(fd, size)
        except BaseException:
            self.close()
            raise

    def _keep(self, number: int, chunk: memoryview) -> None:
        item, start, end = self._chunks[number]
        while start < end:
            start += os.pwrite(self._fds[item], chunk[start - end :], start)

    def _content(self, number: int) -> memoryview:
        item, start, end = self._chunks[number]
        return self._contents[item][start:end]

    def measure(self, first: int, last: int) -> str:
        """The hashes of chunks that it has had from the beginning."""
        return b"".join(hash_of(self._content(number)) for number in range(first, last)).hex()

    def commit(self, verify: bool) -> None:
        """Moves the complete drafts into the store. With `verify`, hashes each once more as a whole."""
        for number, draft in list(self.drafts.items()):
            content, target = self._contents[number], os.path.join(self._folder, self._names[number])
            if verify and name_of(content) != self._names[number]:
                raise OSError(0, f"blob {self._names[number]} arrived damaged")
            if not os.path.exists(draft):  # the store was cleaned meanwhile: memory still has it
                os.makedirs(self._folder, mode=0o700, exist_ok=True)
                with open(draft, "xb") as file:
                    file.write(content)
            seal(draft, self._names[number])
            os.replace(draft, target)
            del self.drafts[number]

    def close(self) -> None:
        """Deletes the drafts that are left."""
        super().close()
        for draft in self.drafts.values():
            with contextlib.suppress(OSError):
                os.unlink(draft)
        self.drafts.clear()
        while self._fds:
            os.close(self._fds.popitem()[1])


def _found(name: str, size: int) -> memoryview | None:
    """An item that the store has, marked as used now."""
    for store in own_stores():
        with contextlib.suppress(OSError), open(os.path.join(store, name), "rb") as file:
            if os.fstat(file.fileno()).st_size == size and is_intact(file.name, name):
                mark_used(file.name)
                return map_file(file.fileno(), size)
    return None


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
