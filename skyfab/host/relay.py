"""The worker of a relay on one host: takes chunks from a neighbor or the client, and passes them on while they arrive.

Each item is content of the host's store, named by its sha256, and is written into a draft that is mapped into memory.
Items are divided into chunks, which come in the order of their numbers and are checked by their hashes. So what a host
has is one number: that of the first chunk that it lacks.
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
from skyfab.host.agent.store import map_blob, map_file
from skyfab.host.channel import Channel, ChannelBroken, NotSent
from skyfab.protocol.blobs import check_name, name_of

if TYPE_CHECKING:
    from collections.abc import Sequence

DAMAGED, BROKEN, ENDED = "damaged", "broken", "ended"
"""Why a host gets no more chunks: the last one does not have its hash; the connection has ended; the relay has."""
HASH: Final = 32
"""Bytes of a chunk's hash."""
_MIB: Final = 1 << 20
_AHEAD: Final = 3
"""Chunks that are asked for at a time, so that none waits for a message to its sender."""


def chunks_of(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """The chunks of items that have these sizes: the item's number, and where the chunk begins and ends in it.

    They have 1 to 4 MiB; the last one of an item has less.
    """
    step = max(_MIB, min(4 * _MIB, sum(sizes) // 256)) & -4096
    return [(item, start, min(start + step, size)) for item, size in enumerate(sizes) for start in range(0, size, step)]


def measure(names: Sequence[str]) -> tuple[list[int], str]:
    """Sizes of items in this host's store, and the hashes of their chunks. Raises FileNotFoundError."""
    areas = [map_blob(own_stores(), check_name(name)) for name in names]
    found = [hashlib.sha256(areas[item][start:end]).digest() for item, start, end in chunks_of([*map(len, areas)])]
    return [*map(len, areas)], b"".join(found).hex()


class HostRelay:
    """What one host has of a relay, where it takes the rest from, and the hosts that take it from here."""

    def __init__(self, items: Sequence[tuple[str, int]], hashes: bytes, keep: bool, keys: tuple[str, str]) -> None:
        """`items` are names and sizes. Those that the store lacks get drafts of their full size. Raises OSError.

        With `keep` they are stored in the cache, else with the pool. `keys` are the certificate and key of channels.
        """
        self._names = [check_name(name) for name, _ in items]
        self._chunks = chunks_of([size for _, size in items])
        self._hashes = hashes
        self._keys = keys
        self._folder = own_stores()[1 if keep else 0]
        self.drafts: dict[int, str] = {}
        """Paths of drafts for the items that the store lacks, by the number of the item."""
        self._areas: list[memoryview] = []
        self._changed = threading.Condition()
        self._source: tuple[Channel, threading.Thread] | None = None
        self._problem = ""
        atexit.register(self.close)
        for number, (name, size) in enumerate(items):
            area = _found(name, size)
            self._areas.append(self._draft(number, name, size) if area is None else area)
        self._missing = [number for number, (item, _, _) in enumerate(self._chunks) if item in self.drafts]
        self._count = 0
        """How many of the missing ones have come."""

    def _draft(self, number: int, name: str, size: int) -> memoryview:
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        fd, self.drafts[number] = tempfile.mkstemp(prefix=f".{name[:16]}-", dir=self._folder)
        try:
            if hasattr(os, "posix_fallocate") and size:  # a full disk is found now, not in the middle
                os.posix_fallocate(fd, 0, size)
            os.truncate(fd, size)
            return map_file(fd, size, shared=True)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(fd)

    @property
    def _at(self) -> int:
        """The first chunk that it lacks."""
        return self._missing[self._count] if self._count < len(self._missing) else len(self._chunks)

    def _view(self, number: int) -> memoryview:
        item, start, end = self._chunks[number]
        return self._areas[item][start:end]

    # ---- receiving

    def connect(self, peer: str, endpoints: Sequence[tuple[str, int]]) -> bool:
        """From now on, takes chunks from another host. Returns False if it cannot be reached."""
        self._leave_source()
        channel = Channel(peer, *self._keys)
        if not channel.connect(endpoints):
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
            thread.join()  # it writes no more
        self._source, self._problem = None, ""

    def _pull(self, channel: Channel) -> None:
        try:
            while wanted := self._missing[self._count : self._count + _AHEAD]:
                for number in wanted:
                    channel.ask(number)
                channel.receive(wanted[0], self._view(wanted[0]))
                if not self._check(wanted[0]):
                    break
        except (ChannelBroken, NotSent):
            self._stop(BROKEN)
        channel.close()

    def _check(self, number: int) -> bool:
        """Accepts a chunk that has come, if it has its hash."""
        if hashlib.sha256(self._view(number)).digest() != self._hashes[HASH * number : HASH * (number + 1)]:
            self._stop(DAMAGED)
            return False
        with self._changed:
            self._count += 1
            self._changed.notify_all()
        return True

    def _stop(self, problem: str) -> None:
        with self._changed:
            self._problem = problem
            self._changed.notify_all()

    def chunk(self, number: int, data: memoryview) -> tuple[int, str, int]:
        """Takes a chunk from the client, if it is the next one."""
        self._leave_source()
        if number == self._at:
            self._view(number)[:] = data
            self._check(number)
        return self.look(0)

    def look(self, seconds: float) -> tuple[int, str, int]:
        """The first chunk that it lacks, why it gets no more, and how many bytes its source has sent.

        Waits until it has all chunks or gets no more, or for a while.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._problem or self._at == len(self._chunks), seconds)
            return self._at, self._problem, self._source[0].received if self._source is not None else 0

    def commit(self, verify: bool) -> None:
        """All drafts are complete: makes them items of the store. With `verify`, hashes them once more as a whole."""
        for number, draft in list(self.drafts.items()):
            area, target = self._areas[number], os.path.join(self._folder, self._names[number])
            if verify and name_of(area) != self._names[number]:
                raise OSError(0, f"blob {self._names[number]} arrived damaged")
            try:
                os.replace(draft, target)
            except FileNotFoundError:  # the store was cleaned meanwhile: the memory still has it
                os.makedirs(self._folder, mode=0o700, exist_ok=True)
                with open(draft, "xb") as file:
                    file.write(area)
                os.replace(draft, target)
            del self.drafts[number]

    # ---- sending

    def listen(self, peer: str, addresses: Sequence[str]) -> list[int]:
        """Waits for a host that takes chunks from here. Returns the ports at these addresses; 0 where there is none."""
        channel = Channel(peer, *self._keys)
        ports = channel.listen(addresses)
        channel.serve(self._next)
        return ports

    def _next(self, number: int) -> memoryview:
        """Waits for a chunk that another host asks for."""
        view = self._view(number)
        with self._changed:
            self._changed.wait_for(lambda: number < self._at or self._problem == ENDED)
        if number >= self._at:
            raise ConnectionError("closed")
        return view

    def close(self) -> None:
        """Deletes the drafts that are left, and ends all that wait."""
        self._stop(ENDED)
        for draft in self.drafts.values():
            with contextlib.suppress(OSError):
                os.unlink(draft)
        self.drafts.clear()


def _found(name: str, size: int) -> memoryview | None:
    """An item that the store has, which is then used now."""
    for store in own_stores():
        with contextlib.suppress(OSError):
            os.utime(os.path.join(store, name))
            if len(area := map_blob([store], name)) == size:
                return area
    return None
