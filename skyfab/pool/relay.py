"""Relays: content that several hosts need leaves this machine once, and hosts pass it on to each other.

Each host has a worker (host/relay.py) and, here, a thread that decides where the host takes its chunks from: from the
one before it in the plan, as long as that works; else from the one before that, and in the end from this machine.
Nobody starts again: a host that changes its source continues with the first chunk that it lacks.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from skyfab._util import schema
from skyfab._util.certificate import new_certificate
from skyfab.calls.pack import PackedCall
from skyfab.calls.project import Tree
from skyfab.errors import HostUnfit, ProtocolError, SkyfabError, UsageError
from skyfab.host.channel import endpoints_of
from skyfab.host.relay import BROKEN, DAMAGED, chunks_of
from skyfab.pool.addresses import machine_of, meeting_addresses
from skyfab.pool.files import Answer, Remote
from skyfab.pool.node import Node, WorkerSpec
from skyfab.protocol.blobs import LARGE, name_of
from skyfab.protocol.frames import Buffer
from skyfab.protocol.messages import Has, Missing
from skyfab.session.fanout import Raised, for_each_host, results_of
from skyfab.ui.events import Events, Notice

Content = Buffer | Path | None
"""Of an item: memory or a file of this machine; None: only other hosts have it."""
Progress = Callable[[Node, int, int], None]
Done = Callable[[Node, Exception | None], None]
CHAIN: Final = 16
"""Hosts that pass content on one after another."""
_LEAST: Final = 4 << 20
"""Bytes of a call that several hosts lack from which on they pass them on to each other."""
_WINDOW: Final = 4
"""Chunks that are on their way from this machine to one host."""
_LOOK: Final = 0.5
"""Seconds, at most, after which a host says how far it is."""
_PATIENCE: Final = 3.0
"""Seconds without progress, or of slow progress, after which a host takes its chunks from another one."""
_SLOW: Final = 4
"""A host is slow if its source gets chunks this many times faster."""
_BEHIND: Final = 4
"""Chunks that a host may lack of those that its source has, without being slow."""
_RESPONSE: Final = 5.0
"""Seconds for another host to open a port."""
_FULL: Final = "free some space, or put the cache on another disk (cache = … in the inventory)"


def plan(count: int) -> list[int | None]:
    """For each host, the number of the one that it takes content from; None: this machine.

    Up to 16 hosts are a chain. More are several: the first host of a chain takes it from the last one of an earlier
    chain, so that no host sends it more than twice.

    >>> plan(3)
    [None, 0, 1]
    """
    heads = [None, *((chain - 1) // 2 * CHAIN + CHAIN - 1 for chain in range(1, count // CHAIN + 1))]
    return [place - 1 if place % CHAIN else heads[place // CHAIN] for place in range(count)]


class Relay:
    """Sends content to the stores of hosts. Thread-safe."""

    def __init__(self, spec_of: Callable[[Node, str], WorkerSpec], events: Events) -> None:
        self._spec_of = spec_of
        self.events = events
        self.apart: set[frozenset[str]] = set()
        """Pairs of hosts of which one could not connect to the other: they do not try again."""

    def send(
        self,
        items: Mapping[str, Content],
        nodes: Sequence[Node],
        *,
        keep: bool = False,
        holders: Mapping[str, Sequence[Node]] | None = None,
        progress: Progress = lambda node, done, total: None,
        done: Done = lambda node, error: None,
    ) -> dict[Node, Exception]:
        """Puts items, by their sha256, into the stores of hosts; with `keep` into the part that outlives the pool.

        What a host has is not sent to it, and what `holders` have does not leave this machine. Returns the errors of
        the hosts that did not get all items. `progress` is called with how many bytes a host has received, and how many
        it lacked; `done` when a host has what came from the same holders, or has failed. Raises UsageError for a file
        of this machine that has changed.
        """
        groups: dict[tuple[Node, ...], dict[str, Content]] = {}
        for name, content in items.items():
            groups.setdefault(tuple((holders or {}).get(name, ())), {})[name] = content
        errors: dict[Node, Exception] = {}
        for owners, group in groups.items():
            left = [node for node in nodes if node not in errors]
            errors |= self._send(group, left, owners, keep, progress, done)
        return errors

    def _send(
        self,
        items: Mapping[str, Content],
        nodes: Sequence[Node],
        owners: Sequence[Node] = (),
        keep: bool = False,
        progress: Progress = lambda node, done, total: None,
        done: Done = lambda node, error: None,
    ) -> dict[Node, Exception]:
        hosts = [_Host(node, self._spec_of(node, "")) for node in dict.fromkeys((*nodes, *owners))]
        errors: dict[Node, Exception] = {}
        with ExitStack() as ends:
            stopped = threading.Event()
            for host in hosts:
                host.remote.stopped = stopped
                ends.callback(host.remote.close)
            ends.callback(stopped.set)  # after Ctrl-C, threads end with their next request
            try:
                found = _Items(items, ends, [host for host in hosts if host.node in owners])
            except HostUnfit as error:
                return dict.fromkeys(nodes, error)
            transfer = _Transfer(self, found, hosts, len(nodes), keep, progress)

            def fill(host: _Host) -> None:
                try:
                    transfer.fill(host)
                except SkyfabError as error:
                    host.error = errors[host.node] = error
                done(host.node, errors.get(host.node))

            results_of(for_each_host(fill, hosts, most=len(hosts)))  # each waits for the one before it
        return {node: error for node, error in errors.items() if node in nodes}

    def share(self, call: PackedCall, nodes: Sequence[Node]) -> None:
        """Sends the large parts of a call to hosts that lack them. Returns at once: the call waits for them there."""
        payloads = (call.function.payload, call.arguments)
        parts = [(payload, part) for payload in payloads for part in payload.buffers if len(part) >= LARGE]
        if len(nodes) < 2 or sum(len(part) for _, part in parts) < _LEAST:
            return
        content: dict[str, Buffer] = {}
        for payload, part in parts:
            name = payload.refs.get(id(part)) or name_of(part)
            payload.refs = {**payload.refs, id(part): name}  # it is not hashed again for each host
            content[name] = part
        sessions = {node: node.session for node in nodes}
        reserved = {node: node.reserve(content) for node in nodes}
        lacking = [node for node, names in reserved.items() if sum(len(content[name]) for name in names) >= _LEAST]

        def done(node: Node, error: Exception | None) -> None:
            for name in reserved.pop(node, ()):
                if error is None:
                    node.arrived(name, None, sessions[node])
                elif node.session is sessions[node]:  # as a single host gets it, with the errors that it has then
                    node.send_blob(name, content[name])

        def relay(lacking: Sequence[Node]) -> None:
            try:
                self._send(content, lacking, done=done)
            finally:
                for node in nodes:
                    done(node, HostUnfit("not relayed", host=node.name))

        if len({machine_of(node) for node in lacking}) > 1:
            threading.Thread(target=relay, args=(lacking,), daemon=True).start()
        else:
            relay(())

    def send_project(self, tree: Tree, nodes: Sequence[Node]) -> None:
        """Sends large files of the project that several hosts lack. Each of them is then asked what it still lacks."""
        large = {name: path for name, path in tree.sources.items() if path.is_file() and path.stat().st_size >= LARGE}
        new = [node for node in nodes if not node.knows(tree)]
        if not large or len({machine_of(node) for node in new}) < 2:
            return

        def missing(node: Node) -> Sequence[str]:
            found = node.session.ask(Has(names=[*large]))
            return found.names if isinstance(found, Missing) else ()

        asked = zip(new, for_each_host(missing, new), strict=True)
        found = {node: names for node, names in asked if not isinstance(names, Raised)}
        lacked = Counter(name for names in found.values() for name in names)
        items = {name: path for name, path in large.items() if lacked[name] > 1}
        if sum(path.stat().st_size for path in items.values()) >= _LEAST:
            with suppress(SkyfabError, OSError):  # each host then says what is wrong
                self.send(items, [node for node in found if not items.keys().isdisjoint(found[node])], keep=True)


class _Items:
    """The items of one relay: names, sizes, chunks and their hashes."""

    def __init__(self, items: Mapping[str, Content], ends: ExitStack, owners: Sequence[_Host]) -> None:
        """Raises UsageError for a file that has changed since it was named; HostUnfit if hosts no longer have them."""
        self._items = [*items.items()]
        self._files: dict[int, int] = {}
        """Descriptors by the number of the item."""
        self.names = [*items]
        self.is_here = None not in items.values()
        if self.is_here:
            for item, content in enumerate(items.values()):
                if isinstance(content, Path):
                    self._files[item] = os.open(content, os.O_RDONLY)
                    ends.callback(os.close, self._files[item])
            self.sizes = [
                os.fstat(self._files[item]).st_size if item in self._files else len(content)  # type: ignore[arg-type]
                for item, content in enumerate(items.values())
            ]
            self.chunks = chunks_of(self.sizes)
            self.hashes = b"".join(self._hashed())
            return
        for owner in owners:
            with suppress(SkyfabError, ValueError):
                self.sizes, hashes = owner.ask(tuple[list[int], str], "measure", self.names)
                self.chunks, self.hashes = chunks_of(self.sizes), bytes.fromhex(hashes)
                return
        raise HostUnfit("no longer has what was to be sent from it", host=", ".join(owner.name for owner in owners))

    def _hashed(self) -> Iterator[bytes]:
        wholes = {item: hashlib.sha256() for item in self._files}
        for number, (item, _, _) in enumerate(self.chunks):
            data = self.read(number)
            if item in wholes:
                wholes[item].update(data)
            yield hashlib.sha256(data).digest()
        for item, whole in wholes.items():
            if whole.hexdigest() != self.names[item]:
                raise self.changed(item)

    def read(self, number: int) -> Buffer:
        """The content of a chunk. Raises UsageError if its file has become shorter."""
        item, start, end = self.chunks[number]
        if item not in self._files:
            return memoryview(self._items[item][1])[start:end]  # type: ignore[arg-type]
        data = os.pread(self._files[item], end - start, start)  # not mmap: a file that shrinks would end this program
        if len(data) < end - start:
            raise self.changed(item)
        return data

    def changed(self, item: int) -> UsageError:
        what = str(self._items[item][1]) if item in self._files else "an object"
        return UsageError(f"{what} has changed while it was sent", hint="send it again")


class _Host:
    """One host of a relay: its worker, what it has, and where it takes the rest from."""

    def __init__(self, node: Node, spec: WorkerSpec) -> None:
        self.node = node
        self.name = node.name
        self.remote = Remote(node, spec, full=_FULL)
        self.is_open = False
        self.was_whole = False
        """It had all items from the beginning."""
        self.error: BaseException | None = None
        self.source: _Host | None = None
        self.avoided: set[_Host] = set()
        """Hosts that it no longer takes chunks from."""
        self.missing: list[int] = []
        """The chunks that it lacked at the beginning."""
        self.at = 0
        """The first chunk that it lacks."""
        self.problem = ""
        self._received = 0
        self.heard = self.moved = time.monotonic()
        """When it last replied, and when it last had received more."""
        self._marks: deque[tuple[float, int]] = deque()
        self.rate = 0.0
        """Chunks a second, over the last seconds."""

    def ask(self, shape: Any, request: str, *arguments: Any) -> Any:
        return self.checked(shape, self.remote.ask(request, *arguments))

    def checked(self, shape: Any, answer: Any) -> Any:
        """Waits for a reply. Raises ProtocolError if it is invalid."""
        try:
            return schema.parse(shape, answer.result())
        except schema.Invalid as error:
            raise ProtocolError(f"invalid reply of a relay: {error}", host=self.name) from None

    def begin(self, source: _Host | None) -> None:
        """From now on it takes chunks from there."""
        self.source, self.problem, self.moved = source, "", time.monotonic()
        self._marks = deque([(self.moved, self.at)])

    def note(self, answer: Any, total: int) -> None:
        """What it says about itself."""
        at, problem, received = self.checked(tuple[int, str, int], answer)
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

    def why_leave(self, source: _Host) -> str:
        """Why it should take its chunks from another source; empty if it should not."""
        if self.problem == DAMAGED:
            return "sent a damaged chunk"
        if self.problem or source.error is not None:
            return "ended the connection"
        now = time.monotonic()
        if source.at <= self.at and now - source.heard <= _PATIENCE:
            self.moved = now  # the source waits too: in a long chain that takes longer than the patience with one
        if now - self.moved > _PATIENCE:
            return "does not respond"
        return "is slow" if source.is_slow else ""

    @property
    def is_slow(self) -> bool:
        """Its source has got chunks much faster for a while."""
        source = self.source
        if source is None or time.monotonic() - self._marks[0][0] < _PATIENCE:
            return False
        if self.at + _BEHIND >= source.at:  # as the next one in a chain is, also while the first chunks come
            return False
        return self.rate * _SLOW < source.rate


class _Transfer:
    """One relay: `fill` runs for each host, on a thread of its own."""

    def __init__(
        self, relay: Relay, items: _Items, hosts: Sequence[_Host], count: int, keep: bool, progress: Progress
    ) -> None:
        """The first `count` of `hosts` get the items. Others have them."""
        self._relay = relay
        self._items = items
        self._hosts = hosts
        self._keep = keep
        self._progress = progress
        self._keys = new_certificate()
        self._before = dict(zip(hosts, plan(count), strict=False))
        self._total = len(items.chunks)
        self._settled: set[_Host] = set()
        """Hosts that have begun, or failed."""
        self._changed = threading.Condition()

    def fill(self, host: _Host) -> None:
        """Puts the items into the store of a host. Raises its errors."""
        try:
            self._open(host)
        finally:
            with self._changed:
                self._settled.add(host)
                self._changed.notify_all()
        if host in self._before and not host.was_whole:
            with self._changed:  # those that respond slowly are skipped
                self._changed.wait_for(lambda: len(self._settled) == len(self._hosts), _PATIENCE)
            self._receive(host)
            host.remote.ask("commit", not self._items.is_here).result()

    def _open(self, host: _Host) -> None:
        described = [*zip(self._items.names, self._items.sizes, strict=True)]
        keys = self._keys or ("", "")
        lacks = set(host.ask(list[int], "open", described, self._items.hashes, self._keep, keys))
        host.missing = [number for number, (item, _, _) in enumerate(self._items.chunks) if item in lacks]
        host.at = host.missing[0] if host.missing else self._total
        host.was_whole, host.is_open = not lacks, True

    def _receive(self, host: _Host) -> None:
        began = time.monotonic()
        host.begin(self._choose(host))
        while host.at < self._total and (source := host.source) is not None:
            pause = min(_LOOK, 0.02 + (time.monotonic() - began) / 10)  # others may wait for this host to listen
            self._note(host, host.remote.ask("look", pause))
            if host.at < self._total and (why := host.why_leave(source)):
                host.avoided.add(source)
                host.begin(self._choose(host))
                now = "this machine" if host.source is None else host.source.name
                self._relay.events.emit(Notice(host=host.name, text=f"{source.name} {why}: takes the rest from {now}"))
        if host.at < self._total:
            self._feed(host)

    def _note(self, host: _Host, answer: Any) -> None:
        host.note(answer, self._total)
        spans = [self._items.chunks[number] for number in host.missing]
        sizes = [end - start for _, start, end in spans]
        self._progress(host.node, sum(sizes[: bisect_left(host.missing, host.at)]), sum(sizes))

    def _choose(self, host: _Host) -> _Host | None:
        """Connects a host with the nearest source that it reaches; None is this machine. Raises HostUnfit."""
        for source in self._sources(host):
            if source is None or self._connect(host, source):
                return source
            if self._items.is_here and {host.name, source.name} in self._relay.apart:
                return None  # it may reach no other one, and finding that out takes seconds
        raise HostUnfit("no other host sends it what it lacks", host=host.name)

    def _sources(self, host: _Host) -> Iterator[_Host | None]:
        place = self._before[host]
        while place is not None:
            yield self._hosts[place]
            place = self._before[self._hosts[place]]
        yield from (other for other in self._hosts if other.was_whole)
        if self._items.is_here:
            yield None

    def _connect(self, host: _Host, source: _Host) -> bool:
        pair = frozenset((host.name, source.name))
        is_fit = source.is_open and source.error is None and source not in host.avoided
        if self._keys is None or not is_fit or pair in self._relay.apart:
            return False
        try:
            addresses = meeting_addresses(source.node, host.node)
            answer = source.remote.ask("listen", host.name, addresses)
            assert isinstance(answer, Answer)
            if not answer.comes_within(_RESPONSE):
                return False
            ports = source.checked(list[int], answer)
        except SkyfabError:
            return False
        if not host.ask(bool, "connect", source.name, endpoints_of(addresses, ports)):
            self._relay.apart.add(pair)
            return False
        return True

    def _feed(self, host: _Host) -> None:
        """Sends a host from here what it lacks."""
        waiting: deque[Any] = deque()
        for number in host.missing[bisect_left(host.missing, host.at) :]:
            waiting.append(host.remote.ask("chunk", number, self._items.read(number)))
            if len(waiting) == _WINDOW:
                self._note(host, waiting.popleft())
        while waiting:
            self._note(host, waiting.popleft())
        if host.at < self._total:
            raise self._items.changed(self._items.chunks[host.at][0])
