"""The relays of an upload: files that several hosts need leave this machine once."""

from __future__ import annotations

import functools
import os
import stat
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from skyfab.env.share import LEAST, by_hosts
from skyfab.errors import SkyfabError, UsageError
from skyfab.files.entries import text
from skyfab.files.source import SMALL, Source, opened
from skyfab.files.transfer import Transfer, packs
from skyfab.host.relay import chunks_of, hash_of, step_of
from skyfab.pool.chain import Chain, ChainHost, Hashes
from skyfab.pool.file_worker import Remote
from skyfab.pool.node import Node
from skyfab.pool.relay import Relay, is_worth

_PATIENCE: Final = 3.0
"""Seconds that an upload waits for hosts that are still comparing, in addition to the time until then."""


@dataclass(slots=True)
class _Member:
    """A host of an upload that has compared its files and lacks some."""

    node: Node
    remote: Remote
    source: Source
    transfer: Transfer
    lacks: Sequence[int]


class SharedUpload:
    """An upload to several hosts. Each host has a thread, which calls `relay` when it knows what the host lacks."""

    def __init__(self, relay: Relay, nodes: Sequence[Node]) -> None:
        self._relay = relay
        self._nodes = nodes
        self._began = time.monotonic()
        self._coming = set(nodes)
        """Hosts that are still comparing."""
        self._members: dict[Node, _Member] = {}
        self._parts: list[_Part] | None = None
        """The relays among the hosts that have compared in time."""
        self._changed = threading.Condition()

    def without(self, node: Node) -> None:
        """Called when a host has failed, or lacks little."""
        with self._changed:
            self._coming.discard(node)
            self._changed.notify_all()

    def relay(self, node: Node, remote: Remote, source: Source, transfer: Transfer, lacks: list[int]) -> list[int]:
        """Relays to a host the files that other hosts lack too. Returns the numbers of files that it still lacks."""
        is_little = sum(transfer.listed(number)[0] for number in lacks) < LEAST
        if is_little or len(self._nodes) == 1 or node.host.transport == "local":
            self.without(node)
            return lacks
        with self._changed:
            if self._parts is None:
                self._members[node] = _Member(node, remote, source, transfer, lacks)
                self.without(node)
                patience = _PATIENCE + time.monotonic() - self._began
                self._changed.wait_for(lambda: not self._coming or self._parts is not None, patience)
            if self._parts is None:
                self._parts = self._arranged()
        left = set(lacks)
        for part in self._parts:
            if node in part.hosts:
                left -= part.fill(self._members[node])
        return [number for number in lacks if number in left]

    def _arranged(self) -> list[_Part]:
        """A relay for each group of hosts that lack the same files."""
        parts: list[_Part] = []
        lacking = {node: self._members[node].lacks for node in self._nodes if node in self._members}
        for nodes, numbers in by_hosts(lacking).items():
            members = [self._members[node] for node in nodes]
            if is_worth(sum(members[0].transfer.listed(number)[0] for number in numbers), nodes):
                parts.append(_Part(len(parts), self._relay, _Files(members[0], numbers), members))
        return parts


class _Part:
    """One of the relays of an upload."""

    def __init__(self, place: int, relay: Relay, files: _Files, members: Sequence[_Member]) -> None:
        self._files = files
        self._members = {member.node: member for member in members}
        self._received = dict.fromkeys(self._members, 0)
        """Bytes that have arrived."""
        self.hosts = {
            member.node: ChainHost(member.node, functools.partial(member.remote.ask, "relay", place))
            for member in members
        }
        hosts = [*self.hosts.values()]
        self._chain = Chain(files, hosts, len(hosts), relay.events, relay.apart, self._progress)

    def fill(self, member: _Member) -> set[int]:
        """Has a host receive the files. Returns the numbers of those that it has, even if other hosts fail."""
        host = self.hosts[member.node]
        try:
            self._chain.fill(host)
        except SkyfabError as error:
            host.error = error  # other hosts leave it; its transfer raises its own errors again
        lacks = {*range(len(self._files.items))}
        with suppress(SkyfabError):
            lacks = set(host.ask(list[int], "commit"))
        items = [files for item, files in enumerate(self._files.items) if item not in lacks]
        numbers = [number for files in items for number, _, _ in files]
        member.transfer.relayed(numbers, self._received[member.node])
        return {*numbers}

    def _progress(self, node: Node, done: int, total: int) -> None:
        self._members[node].transfer.arrived(done - self._received[node])
        self._received[node] = done


class _Files:
    """Large files, and packs of small ones. Files that differ from the listing are left to the hosts' transfers."""

    is_here = True

    def __init__(self, member: _Member, numbers: Sequence[int]) -> None:
        self._paths = member.source.paths
        files = [(number, *member.transfer.listed(number)) for number in numbers]
        files.sort(key=lambda file: file[1] > SMALL)
        self.items = [*packs([file for file in files if file[1]], lambda file: file[1])]  # empty ones may be of /proc
        """Lists of files: number, size and time of each."""
        sizes = [sum(size for _, size, _ in files) for files in self.items]
        self._step = step_of(sum(sizes))
        self.chunks = chunks_of(sizes, self._step)
        self.hashes = Hashes(hash_of(self._content(*chunk)) for chunk in self.chunks)

    @property
    def about(self) -> tuple[Any, ...]:
        return self.items, self._step

    def read(self, number: int) -> bytes:
        """The content of a chunk; empty if a file has changed."""
        return self._content(*self.chunks[number])

    def _content(self, item: int, start: int, end: int) -> bytes:
        files = self.items[item]
        spans = [(start, end)] if len(files) == 1 else [(0, size) for _, size, _ in files]
        found = [self._part(*file, *span) for file, span in zip(files, spans, strict=True)]
        return b"".join(found) if all(found) else b""

    def _part(self, number: int, size: int, time: int, start: int, end: int) -> bytes:
        """A part of a file as it was listed; empty if it has changed."""
        try:
            with opened(self._paths[number], os.O_RDONLY | os.O_NONBLOCK) as fd:
                data = os.pread(fd, end - start, start)
                about = os.fstat(fd)  # after reading: so all parts are of one version
        except OSError:
            return b""
        is_same = stat.S_ISREG(about.st_mode) and (about.st_size, about.st_mtime_ns) == (size, time)
        return data if is_same and len(data) == end - start else b""

    def changed(self, item: int) -> UsageError:
        return UsageError(f"{text(self._paths[self.items[item][0][0]])} changed while it was being sent")
