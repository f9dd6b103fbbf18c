"""Relays: content that several hosts need leaves this machine once, and hosts pass it on to each other (chain.py)."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from skyfab.calls.pack import PackedCall
from skyfab.calls.project import Tree
from skyfab.env.share import LEAST, by_hosts
from skyfab.errors import HostUnfit, SkyfabError, UsageError
from skyfab.host.relay import HASH, chunks_of, hash_of
from skyfab.pool.addresses import machine_of
from skyfab.pool.chain import Chain, ChainHost, Hashes, Progress
from skyfab.pool.file_worker import opened
from skyfab.pool.node import Node, WorkerSpec
from skyfab.protocol.blobs import LARGE, name_of
from skyfab.protocol.frames import Buffer
from skyfab.protocol.messages import Has, Missing
from skyfab.session.fanout import Raised, for_each_host, results_of
from skyfab.ui.events import Events

Content = Buffer | Path | int
"""The content of an item: memory or a file of this machine; or its size, if only other hosts have it."""
Done = Callable[[Node, Exception | None], None]
_MEASURED: Final = 16
"""Hashes of one reply of a host that has the items."""
FULL: Final = "free some space, or put the cache on another disk (cache = … in the inventory)"


def is_worth(size: int, nodes: Collection[Node]) -> bool:
    """Whether hosts should pass on to each other this many bytes, which all of them lack."""
    return size >= LEAST and len({machine_of(node) for node in nodes}) > 1


class Relay:
    """Sends content to the stores of hosts. Thread-safe."""

    def __init__(self, spec_of: Callable[[Node, str], WorkerSpec], events: Events) -> None:
        self._spec_of = spec_of
        self.events = events
        self.apart: set[frozenset[str]] = set()
        """Pairs of hosts of which one could not connect to the other; they do not try again."""

    def send(
        self,
        items: Mapping[str, Content],
        nodes: Sequence[Node],
        *,
        keep: bool = False,
        verify: bool = False,
        holders: Sequence[Node] = (),
        progress: Progress = lambda node, done, total: None,
        done: Done = lambda node, error: None,
    ) -> dict[Node, Exception]:
        """Puts items, by their sha256, into the stores of hosts; with `keep`, into the part that outlives the pool.

        Does not send a host what it has. With `holders`, which have all of the items, nothing is sent from here. With
        `verify`, hosts also check each item as a whole: it may have been modified after it was named.
        Returns the errors of the hosts that did not get all items. Calls `progress` with how many bytes a host has
        received and how many it lacked, and `done` when a host has all items or has failed. Raises UsageError for a
        file of this machine that has changed.
        """
        errors: dict[Node, Exception] = {}
        with ExitStack() as ends:
            remotes = ends.enter_context(opened((*nodes, *holders), self._spec_of, full=FULL))
            hosts = [ChainHost(node, remote.ask) for node, remote in remotes.items()]
            owners = [host for host in hosts if host.node in holders]
            found = _Items(items, keep, owners, ends)
            ends.callback(found.hashes.close)
            chain = Chain(found, hosts, len(nodes), self.events, self.apart, progress)

            def fill(host: ChainHost) -> None:
                try:
                    if chain.fill(host):
                        host.ask(Any, "commit", verify or not found.is_here)
                except SkyfabError as error:
                    host.error = errors[host.node] = error
                done(host.node, errors.get(host.node))

            results_of(for_each_host(fill, hosts, most=len(hosts)))  # each waits for the one before it
            if isinstance(found.hashes.error, UsageError):
                raise found.hashes.error
        return {node: error for node, error in errors.items() if node in nodes}

    def share(self, call: PackedCall, nodes: Sequence[Node]) -> None:
        """Sends the large parts of a call to hosts that lack them. Returns immediately: the call waits for them."""
        payloads = (call.function.payload, call.arguments)
        parts = [(payload, part) for payload in payloads for part in payload.buffers if len(part) >= LARGE]
        if len(nodes) < 2 or sum(len(part) for _, part in parts) < LEAST:
            return
        content: dict[str, Buffer] = {}
        may_change = not all(id(part) in payload.refs or type(part.obj) is bytes for payload, part in parts)
        for payload, part in parts:
            name = payload.refs.get(id(part)) or name_of(part)
            payload.refs = {**payload.refs, id(part): name}  # it is not hashed again for each host
            content[name] = part
        sessions = {node: node.session for node in nodes}
        reserved = {node: node.store.reserve(content) for node in nodes}
        lacking = [node for node, names in reserved.items() if sum(len(content[name]) for name in names) >= LEAST]

        def done(node: Node, error: Exception | None) -> None:
            for name in reserved.pop(node, ()):
                if error is None or isinstance(error, UsageError):  # it was modified
                    node.store.arrived(name, error, sessions[node])
                elif node.session is sessions[node]:  # as to a single host, with the same errors
                    node.store.send(name, content[name])

        def relay() -> None:
            try:
                self.send(content, lacking, done=done, verify=may_change)
            finally:
                send_directly()

        def send_directly() -> None:
            for node in nodes:
                done(node, HostUnfit("not relayed", host=node.name))

        if is_worth(LEAST, lacking):
            threading.Thread(target=relay, daemon=True).start()
        else:
            send_directly()

    def send_project(self, tree: Tree, nodes: Sequence[Node]) -> None:
        """Sends large files of the project that several hosts lack. Then each host is asked what it still lacks."""
        large = {name: path for name, path in tree.sources.items() if path.is_file() and path.stat().st_size >= LARGE}
        new = [node for node in nodes if not node.store.knows(tree)]
        if not is_worth(sum(path.stat().st_size for path in large.values()), new):
            return

        def missing(node: Node) -> Sequence[str]:
            found = node.session.ask(Has(names=[*large]))
            return [name for name in found.names if name in large] if isinstance(found, Missing) else ()

        asked = zip(new, for_each_host(missing, new), strict=True)
        for group, names in by_hosts({node: found for node, found in asked if not isinstance(found, Raised)}).items():
            items = {name: large[name] for name in names}
            with suppress(SkyfabError, OSError):  # each host then reports its own error
                if is_worth(sum(path.stat().st_size for path in items.values()), group):
                    self.send(items, group, keep=True)


class _Items:
    """The items of one relay: names, sizes, chunks and their hashes."""

    def __init__(self, items: Mapping[str, Content], keep: bool, owners: Sequence[ChainHost], ends: ExitStack) -> None:
        """`owners` have the items that are not here. Raises UsageError for a file that is empty and was not."""
        self.is_here = not owners
        self._contents = [*items.values()]
        self._keep = keep
        self._files: dict[int, int] = {}
        """Descriptors by the number of the item."""
        self._named: list[tuple[str, int]] = []
        """Names and sizes."""
        for item, (name, content) in enumerate(items.items()):
            if isinstance(content, Path):
                self._files[item] = os.open(content, os.O_RDONLY)
                ends.callback(os.close, self._files[item])
                size = os.fstat(self._files[item]).st_size
            else:
                size = content if isinstance(content, int) else len(content)
            if not size and name != name_of(b""):
                raise self.changed(item)
            self._named.append((name, size))
        self.chunks = chunks_of([size for _, size in self._named])
        self.hashes = Hashes(self._hashed() if self.is_here else self._hashed_by(owners))

    @property
    def about(self) -> tuple[Any, ...]:
        return self._named, self._keep

    def _hashed(self) -> Iterator[bytes]:
        """The hashes of chunks. Raises UsageError at the last one of a file that has changed since it was named."""
        wholes = {item: hashlib.sha256() for item in self._files}
        for number, (item, _, end) in enumerate(self.chunks):
            data = self.read(number)
            name, size = self._named[item]
            if item in wholes:
                wholes[item].update(data)
                if end == size and wholes[item].hexdigest() != name:
                    raise self.changed(item)
            yield hash_of(data)

    def _hashed_by(self, owners: Sequence[ChainHost]) -> Iterator[bytes]:
        """The hashes of chunks that only hosts have. Raises HostUnfit if none of them has the items any longer."""
        left = deque(owners)
        for first in range(0, len(self.chunks), _MEASURED):
            last = min(first + _MEASURED, len(self.chunks))
            hashes = b""
            while not hashes:
                if not left:
                    names = ", ".join(owner.name for owner in owners)
                    raise HostUnfit("no longer has the content to relay", host=names)
                with suppress(SkyfabError, ValueError):
                    hashes = bytes.fromhex(left[0].ask(str, "measure", first, last)) if left[0].was_whole else b""
                if len(hashes) != HASH * (last - first):
                    hashes = b""
                    left.popleft()
            yield from (hashes[at : at + HASH] for at in range(0, len(hashes), HASH))

    def read(self, number: int) -> Buffer:
        """The content of a chunk. Raises UsageError if its file has become shorter."""
        item, start, end = self.chunks[number]
        if item not in self._files:
            return memoryview(self._contents[item])[start:end]  # type: ignore[arg-type]
        data = os.pread(self._files[item], end - start, start)  # not mmap: a file that shrinks would crash this program
        if len(data) < end - start:
            raise self.changed(item)
        return data

    def changed(self, item: int) -> UsageError:
        """The error for an item whose content has changed."""
        if isinstance(self._contents[item], Path):
            return UsageError(f"{self._contents[item]!s} changed while it was being sent", hint="send it again")
        hint = "do not modify it until the call has ended, or pass a copy"
        return UsageError("an argument changed while it was being sent", hint=hint)
