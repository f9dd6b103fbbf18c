"""Relays: content that several hosts need leaves this machine once, and hosts pass it on to each other (chain.py)."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from skyfab.calls.pack import PackedCall
from skyfab.calls.project import Tree
from skyfab.errors import HostUnfit, ProtocolError, SkyfabError, UsageError
from skyfab.host.relay import HASH, chunks_of, hash_of
from skyfab.pool.addresses import machine_of
from skyfab.pool.chain import Chain, ChainHost, Hashes, Progress
from skyfab.pool.file_worker import Remote
from skyfab.pool.node import Node, WorkerSpec
from skyfab.protocol.blobs import LARGE, name_of
from skyfab.protocol.frames import Buffer
from skyfab.protocol.messages import Has, Missing
from skyfab.session.fanout import Raised, for_each_host, results_of
from skyfab.ui.events import Events

Content = Buffer | Path | None
"""The content of an item: memory or a file of this machine, or None if only other hosts have it."""
Done = Callable[[Node, Exception | None], None]
LEAST: Final = 4 << 20
"""Bytes that several hosts must lack of a call before they pass them on to each other."""
_MEASURED: Final = 16
"""Hashes of one reply of a host that has the items."""
FULL: Final = "free some space, or put the cache on another disk (cache = … in the inventory)"


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
        holders: Mapping[str, Sequence[Node]] | None = None,
        progress: Progress = lambda node, done, total: None,
        done: Done = lambda node, error: None,
    ) -> dict[Node, Exception]:
        """Puts items, by their sha256, into the stores of hosts; with `keep`, into the part that outlives the pool.

        Does not send a host what it has, and does not send from here what `holders` have. Returns the errors of the
        hosts that did not get all items. Calls `progress` with how many bytes a host has received and how many it
        lacked, and `done` when a host has all items of the same holders, or has failed. Raises UsageError for a file
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
        may_change: bool = False,
    ) -> dict[Node, Exception]:
        """With `may_change`, the program may modify items after they were named."""
        nodes_of_all = dict.fromkeys((*nodes, *owners))
        remotes = [Remote(node, self._spec_of(node, ""), full=FULL) for node in nodes_of_all]
        hosts = [ChainHost(node, remote) for node, remote in zip(nodes_of_all, remotes, strict=True)]
        errors: dict[Node, Exception] = {}
        with ExitStack() as ends:
            stopped = threading.Event()
            for remote in remotes:
                remote.stopped = stopped
                ends.callback(remote.close)
            ends.callback(stopped.set)  # after Ctrl-C, threads end at their next request
            try:
                if None in items.values():
                    found: _Items = _OthersItems([*items], keep, [host for host in hosts if host.node in owners])
                else:
                    found = _OwnItems(items, keep, ends)
            except HostUnfit as error:
                return dict.fromkeys(nodes, error)
            ends.callback(found.hashes.close)
            chain = Chain(found, hosts, len(nodes), self.events, self.apart, progress)

            def fill(host: ChainHost) -> None:
                try:
                    if chain.fill(host):
                        host.remote.ask("commit", may_change or not found.is_here).result()
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

        def relay(lacking: Sequence[Node]) -> None:
            try:
                if lacking:
                    self._send(content, lacking, done=done, may_change=may_change)
            finally:
                for node in nodes:
                    done(node, HostUnfit("not relayed", host=node.name))

        if len({machine_of(node) for node in lacking}) > 1:
            threading.Thread(target=relay, args=(lacking,), daemon=True).start()
        else:
            relay(())

    def send_project(self, tree: Tree, nodes: Sequence[Node]) -> None:
        """Sends large files of the project that several hosts lack. Then each host is asked what it still lacks."""
        large = {name: path for name, path in tree.sources.items() if path.is_file() and path.stat().st_size >= LARGE}
        new = [node for node in nodes if not node.store.knows(tree)]
        if not large or len({machine_of(node) for node in new}) < 2:
            return

        def missing(node: Node) -> Sequence[str]:
            found = node.session.ask(Has(names=[*large]))
            return found.names if isinstance(found, Missing) else ()

        asked = zip(new, for_each_host(missing, new), strict=True)
        found = {node: names for node, names in asked if not isinstance(names, Raised)}
        lacked = Counter(name for names in found.values() for name in names)
        items = {name: path for name, path in large.items() if lacked[name] > 1}
        if sum(path.stat().st_size for path in items.values()) >= LEAST:
            with suppress(SkyfabError, OSError):  # each host then reports its own error
                self.send(items, [node for node in found if not items.keys().isdisjoint(found[node])], keep=True)


class _Items:
    """The items of one relay: names, sizes, chunks and their hashes."""

    is_here = True
    hashes: Hashes

    def __init__(self, names: Sequence[str], sizes: Sequence[int], keep: bool) -> None:
        self._named = [*zip(names, sizes, strict=True)]
        self._keep = keep
        self.chunks = chunks_of(sizes)

    @property
    def about(self) -> tuple[Any, ...]:
        return self._named, self._keep

    def read(self, number: int) -> Buffer:
        """The content of a chunk."""
        raise NotImplementedError

    def changed(self, item: int) -> UsageError:
        raise NotImplementedError


class _OwnItems(_Items):
    """Memory and files of this machine."""

    def __init__(self, items: Mapping[str, Content], keep: bool, ends: ExitStack) -> None:
        """Raises UsageError for an empty file that was not empty when it was named."""
        self._contents = [*items.values()]
        self._files: dict[int, int] = {}
        """Descriptors by the number of the item."""
        sizes: list[int] = []
        for item, content in enumerate(self._contents):
            if isinstance(content, Path):
                self._files[item] = os.open(content, os.O_RDONLY)
                ends.callback(os.close, self._files[item])
                sizes.append(os.fstat(self._files[item]).st_size)
            else:
                assert content is not None
                sizes.append(len(content))
        super().__init__([*items], sizes, keep)
        self.hashes = Hashes(self._hashed())
        for item, (name, size) in enumerate(self._named):
            if not size and name != name_of(b""):
                raise self.changed(item)

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

    def read(self, number: int) -> Buffer:
        """Raises UsageError if its file has become shorter."""
        item, start, end = self.chunks[number]
        if item not in self._files:
            return memoryview(self._contents[item])[start:end]  # type: ignore[arg-type]
        data = os.pread(self._files[item], end - start, start)  # not mmap: a file that shrinks would crash this program
        if len(data) < end - start:
            raise self.changed(item)
        return data

    def changed(self, item: int) -> UsageError:
        if item in self._files:
            return UsageError(f"{self._contents[item]!s} changed while it was being sent", hint="send it again")
        hint = "do not modify it until the call has ended, or pass a copy"
        return UsageError("an argument changed while it was being sent", hint=hint)


class _OthersItems(_Items):
    """What only hosts have: they have it in their stores."""

    is_here = False

    def __init__(self, names: Sequence[str], keep: bool, owners: Sequence[ChainHost]) -> None:
        """Raises HostUnfit if the owners no longer have the items."""
        self._names = names
        self._owners = deque(owners)
        sizes, _ = self._measured(0, 0)
        super().__init__(names, sizes, keep)
        self.hashes = Hashes(self._hashed())

    def _hashed(self) -> Iterator[bytes]:
        for first in range(0, len(self.chunks), _MEASURED):
            _, hashes = self._measured(first, first + _MEASURED)
            if len(hashes) != HASH * len(self.chunks[first : first + _MEASURED]):
                raise ProtocolError("invalid reply of a relay", host=self._owners[0].name)
            yield from (hashes[at : at + HASH] for at in range(0, len(hashes), HASH))

    def _measured(self, first: int, last: int) -> tuple[list[int], bytes]:
        names = ", ".join(owner.name for owner in self._owners)
        while self._owners:
            with suppress(SkyfabError, ValueError):
                sizes, hashes = self._owners[0].ask(tuple[list[int], str], "measure", self._names, first, last)
                return sizes, bytes.fromhex(hashes)
            self._owners.popleft()
        raise HostUnfit("no longer has the content to relay", host=names)
