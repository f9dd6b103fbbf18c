"""A relay: for each of its hosts, a thread that decides where the host takes its chunks from.

The source is the host before it in the plan while that works; else the one before that, and in the end this machine.
No host starts over: one that changes its source continues with the first chunk that it lacks.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Final, Protocol

from skyfab._util.certificate import new_certificate
from skyfab.errors import HostUnfit, ProtocolError, SkyfabError, UsageError
from skyfab.files.transfer import Reply, check
from skyfab.host.channel import endpoints_of
from skyfab.host.relay import BROKEN, DAMAGED, HASH
from skyfab.pool.addresses import meeting_addresses
from skyfab.pool.node import Node
from skyfab.protocol.frames import Buffer
from skyfab.ui.events import Events, Notice

Progress = Callable[[Node, int, int], None]
CHAIN: Final = 16
"""Hosts that pass content on one after another."""
_WINDOW: Final = 4
"""Chunks in transit from this machine to one host, at most."""
_LOOK: Final = 0.5
"""Seconds, at most, after which a host reports its progress."""
_PATIENCE: Final = 3.0
"""Seconds without progress, or with slow progress, after which a host changes its source."""
_SLOW: Final = 4
"""A host is slow if its source gets chunks this many times faster."""
_BEHIND: Final = 4
"""How many chunks a host may be behind its source without being slow."""
_RESPONSE: Final = 5.0
"""Seconds for another host to open a port."""
_HASHED: Final = 64
"""Hashes that a host has ahead of what it has received: chunks are then read again while they are in memory."""


def plan(count: int) -> list[int | None]:
    """For each host, the number of the one that it takes content from; None: this machine.

    Up to 16 hosts form a chain. More hosts form several: the first host of a chain takes the content from the last one
    of an earlier chain, so that no host sends it more than twice.

    >>> plan(3)
    [None, 0, 1]
    """
    heads = [None, *((chain - 1) // 2 * CHAIN + CHAIN - 1 for chain in range(1, count // CHAIN + 1))]
    return [place - 1 if place % CHAIN else heads[place // CHAIN] for place in range(count)]


class Hashes:
    """The hashes of chunks, computed one after another when they are needed. Thread-safe."""

    def __init__(self, source: Iterator[bytes]) -> None:
        """`source` computes the next one. What it raises, all who ask for further hashes get."""
        self._source = source
        self._found = bytearray()
        self.error: Exception | None = None
        """Why there are no further hashes."""
        self._lock = threading.Lock()

    def some(self, first: int, last: int) -> bytes:
        """Those of some chunks; the first of these if computing them takes long."""
        until = time.monotonic() + _LOOK
        while len(self._found) < last * HASH and (len(self._found) <= first * HASH or time.monotonic() < until):
            with self._lock:
                if self.error is not None:
                    raise self.error
                if len(self._found) < last * HASH:
                    try:
                        self._found += next(self._source)
                    except Exception as error:
                        self.error = error
                        raise
        return bytes(self._found[first * HASH : last * HASH])

    def close(self) -> None:
        """No more are needed: the source refers to the content, which would otherwise stay in memory for a while."""
        with self._lock:
            self._source = iter(())


class Items(Protocol):
    """What is relayed."""

    chunks: list[tuple[int, int, int]]
    """For each chunk, the number of its item, and where it begins and ends in it."""
    hashes: Hashes
    is_here: bool

    @property
    def about(self) -> tuple[Any, ...]:
        """The description of the items that is sent to the workers of hosts."""

    def read(self, number: int) -> Buffer:
        """The content of a chunk."""

    def changed(self, item: int) -> UsageError:
        """The error for an item whose content has changed."""


class ChainHost:
    """One host of a relay: its worker, what it has, and where it takes the rest from."""

    def __init__(self, node: Node, request: Callable[..., Any]) -> None:
        """`request` sends a request to its worker, as `Remote.ask`."""
        self.node = node
        self.name = node.name
        self.request = request
        self.is_open = False
        self.was_whole = False
        """It had all items at the beginning."""
        self.error: BaseException | None = None
        self.source: ChainHost | None = None
        self.avoided: set[ChainHost] = set()
        """Hosts that it no longer takes chunks from."""
        self.missing: list[int] = []
        """The chunks that it lacked at the beginning."""
        self.sums = [0]
        """The total size of the first N of these, for each N."""
        self.at = 0
        """The first chunk that it lacks."""
        self.hashed = 0
        """The first chunk whose hash it lacks."""
        self.problem = ""
        self._received = 0
        self.heard = self.moved = time.monotonic()
        """When it last replied, and when it last made progress."""
        self._marks: deque[tuple[float, int]] = deque()
        self.rate = 0.0
        """Chunks a second, over the last seconds."""

    def ask(self, shape: Any, request: str, *arguments: Any) -> Any:
        return check(request, self.request(request, *arguments), shape, self.name)

    def begin(self, source: ChainHost | None) -> None:
        """Takes chunks from this source from now on."""
        self.source, self.problem, self.moved = source, "", time.monotonic()
        self._marks = deque([(self.moved, self.at)])

    def note(self, answer: Reply, total: int) -> None:
        """Takes over what the host reports about itself."""
        at, problem, received = check("look", answer, tuple[int, str, int], self.name)
        if not self.at <= at <= total or problem not in ("", DAMAGED, BROKEN):
            raise ProtocolError("invalid reply of a relay", host=self.name)
        now = time.monotonic()
        self.moved = now if (at, received) != (self.at, self._received) else self.moved
        self.at, self.problem, self._received, self.heard = at, problem, received, now
        self._marks.append((now, at))
        while now - self._marks[1][0] > _PATIENCE:
            self._marks.popleft()
        began, first = self._marks[0]
        self.rate = (at - first) / max(now - began, 0.001)

    def why_leave(self, source: ChainHost) -> str:
        """Why it should leave its source; empty if it should not."""
        if self.problem == DAMAGED:
            return "sent a damaged chunk"
        if self.problem or source.error is not None:
            return "ended the connection"
        now = time.monotonic()
        if source.at <= self.at and now - source.heard <= _PATIENCE:
            self.moved = now  # the source waits too, in a long chain longer than _PATIENCE
        if now - self.moved > _PATIENCE:
            return "does not respond"
        return "is slow" if source.is_slow else ""

    @property
    def is_slow(self) -> bool:
        """Whether its source has received chunks much faster for a while."""
        source = self.source
        if source is None or time.monotonic() - self._marks[0][0] < _PATIENCE:
            return False
        if self.at + _BEHIND >= source.at:  # normal in a chain, also for the first chunks
            return False
        return self.rate * _SLOW < source.rate


class Chain:
    """One relay: `fill` runs for each host, each on its own thread."""

    def __init__(
        self,
        items: Items,
        hosts: Sequence[ChainHost],
        count: int,
        events: Events,
        apart: set[frozenset[str]],
        progress: Progress,
    ) -> None:
        """The first `count` of `hosts` get the items. Others have them.

        `apart` are pairs of hosts of which one could not connect to the other.
        """
        self._items = items
        self._hosts = hosts
        self._events = events
        self._apart = apart
        self._progress = progress
        self._keys = new_certificate()
        self._before = dict(zip(hosts, plan(count), strict=False))
        self._total = len(items.chunks)
        self._settled: set[ChainHost] = set()
        """Hosts that have begun, or failed."""
        self._changed = threading.Condition()

    def fill(self, host: ChainHost) -> bool:
        """Has a host receive what it lacks. Returns whether it lacked anything. Raises its errors."""
        try:
            self._open(host)
        finally:
            with self._changed:
                self._settled.add(host)
                self._changed.notify_all()
        if host not in self._before or host.was_whole:
            return False
        with self._changed:  # those that respond slowly are skipped
            self._changed.wait_for(lambda: len(self._settled) == len(self._hosts), _PATIENCE)
        self._receive(host)
        return True

    def _open(self, host: ChainHost) -> None:
        keys = self._keys or ("", "")
        lacks = dict(host.ask(list[tuple[int, int]], "open", *self._items.about, keys))
        if begun := [number for number, (item, _, end) in enumerate(self._items.chunks) if end <= lacks.get(item, 0)]:
            while host.hashed <= begun[-1]:
                host.request("look", 0, *self._hashes(host, begun[-1] + 1)).result()
            lacks = dict(host.ask(list[tuple[int, int]], "resume"))
        host.missing = [
            number for number, (item, start, _) in enumerate(self._items.chunks) if start >= lacks.get(item, start + 1)
        ]
        spans = [self._items.chunks[number] for number in host.missing]
        host.sums = [0, *accumulate(end - start for _, start, end in spans)]
        host.at = host.missing[0] if host.missing else self._total
        host.was_whole, host.is_open = not lacks, True

    def _receive(self, host: ChainHost) -> None:
        began = time.monotonic()
        host.begin(self._choose(host))
        while host.at < self._total and (source := host.source) is not None:
            pause = min(_LOOK, 0.02 + (time.monotonic() - began) / 10)  # other hosts may wait until this one listens
            hashes = self._hashes(host, min(host.at + _HASHED, self._total))
            self._note(host, host.request("look", pause, *hashes))
            if host.at < self._total and (why := host.why_leave(source)):
                host.avoided.add(source)
                host.begin(self._choose(host))
                now = "this machine" if host.source is None else host.source.name
                self._events.emit(Notice(host=host.name, text=f"{source.name} {why}; the rest comes from {now}"))
        if host.at < self._total:
            self._feed(host)

    def _hashes(self, host: ChainHost, last: int) -> tuple[int, bytes]:
        """The number of the first chunk whose hash a host lacks, and the hashes from there on to `last`."""
        first = host.hashed
        hashes = self._items.hashes.some(first, last) if first < last else b""
        host.hashed += len(hashes) // HASH
        return first, hashes

    def _note(self, host: ChainHost, answer: Any) -> None:
        host.note(answer, self._total)
        self._progress(host.node, host.sums[bisect_left(host.missing, host.at)], host.sums[-1])

    def _choose(self, host: ChainHost) -> ChainHost | None:
        """Connects a host to the nearest source that it reaches; None is this machine. Raises HostUnfit."""
        for source in self._sources(host):
            if source is None or self._connect(host, source):
                return source
            if self._items.is_here and {host.name, source.name} in self._apart:
                return None  # it may reach no other host, and each attempt takes seconds
        raise HostUnfit("no other host can send it what it lacks", host=host.name)

    def _sources(self, host: ChainHost) -> Iterator[ChainHost | None]:
        place = self._before[host]
        while place is not None:
            yield self._hosts[place]
            place = self._before[self._hosts[place]]
        yield from (other for other in self._hosts if other.was_whole)
        if self._items.is_here:
            yield None

    def _connect(self, host: ChainHost, source: ChainHost) -> bool:
        pair = frozenset((host.name, source.name))
        is_fit = source.is_open and source.error is None and source not in host.avoided
        if self._keys is None or not is_fit or pair in self._apart:
            return False
        try:
            addresses = meeting_addresses(source.node, host.node)
            answer = source.request("listen", host.name, addresses)
            if not answer.comes_within(_RESPONSE):
                return False
            ports = check("listen", answer, list[int], source.name)
        except SkyfabError:
            return False
        if not host.ask(bool, "connect", source.name, endpoints_of(addresses, ports)):
            self._apart.add(pair)
            return False
        return True

    def _feed(self, host: ChainHost) -> None:
        """Sends a host what it lacks from this machine."""
        waiting: deque[Any] = deque()
        for number in host.missing[bisect_left(host.missing, host.at) :]:
            hashed = self._items.hashes.some(number, number + 1)
            waiting.append(host.request("chunk", number, hashed, self._items.read(number)))
            if len(waiting) == _WINDOW:
                self._note(host, waiting.popleft())
        while waiting:
            self._note(host, waiting.popleft())
        if host.at < self._total:
            raise self._items.changed(self._items.chunks[host.at][0])
