"""Compiled kernels travel: what one host of a pool has compiled, hosts with the same hardware and packages get too.

This machine keeps a copy (``compiled/KEY`` in its cache), for pools with other hosts. Nothing waits for it: a host that
needs a kernel before it arrives compiles it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from skyfab._util.cache import cache_folder, made_cache
from skyfab.errors import ProtocolError
from skyfab.files.entries import walk
from skyfab.files.source import Source
from skyfab.files.target import Target
from skyfab.files.transfer import Here, Side, Transfer, check
from skyfab.pool.file_worker import Remote, fits
from skyfab.pool.node import Node, WorkerSpec
from skyfab.session.fanout import Raised, for_each_host
from skyfab.ui.events import CallEnded, Event, Events

_LONG: Final = 1.0
"""Seconds that a call takes at least if it has compiled something."""
_MOST: Final = 2 << 30
"""Bytes of all kernels that this machine keeps: a hostile host could send any number."""
_LEAST: Final = 4096
"""Bytes that a file counts at least, and a folder or link: these are made before their sizes are compared."""


@contextlib.contextmanager
def shared(nodes: Sequence[Node], spec_of: Callable[[Node, str], WorkerSpec], events: Events) -> Iterator[None]:
    """Exchanges the kernels of these hosts during the block: when one imports packages, and after its long calls."""
    if len(nodes) == 1:
        yield
        return
    exchange = _Exchange(nodes, spec_of)
    unsubscribe = events.subscribe(exchange.note)
    for node in nodes:
        node.on_imports = functools.partial(exchange.begin, node)
    try:
        yield
    finally:
        unsubscribe()
        exchange.close()


class _Exchange:
    """The exchange, on threads: one at a time works, for all hosts that are due."""

    def __init__(self, nodes: Sequence[Node], spec_of: Callable[[Node, str], WorkerSpec]) -> None:
        self._nodes = nodes
        self._spec_of = spec_of
        self._stopped = threading.Event()
        self._working = threading.Lock()
        self._due: set[Node] = set()
        """Hosts to exchange kernels with."""
        self._importing: set[Node] = set()
        """Hosts that have begun to import packages."""
        self._keys: dict[Node, str] = {}
        """What the kernels of each host depend on; empty if it has no torch."""

    def begin(self, node: Node) -> None:
        """A host has begun to import packages. Called on the thread that reads what hosts send."""
        node.on_imports = lambda: None
        self._importing.add(node)
        if any((cache_folder() / "compiled").glob("*/*")):
            self._exchange_with(node)

    def note(self, event: Event) -> None:
        if isinstance(event, CallEnded) and event.seconds >= _LONG and self._importing:
            for node in self._nodes:
                if node.name == event.host and self._keys.get(node) != "":
                    self._exchange_with(node)

    def close(self) -> None:
        self._stopped.set()
        with self._working:  # what still works ends with its next request, or is left behind
            pass

    def _exchange_with(self, node: Node) -> None:
        if node not in self._due:
            self._due.add(node)
            threading.Thread(target=self._work, name="skyfab-kernels", daemon=True).start()

    def _work(self) -> None:
        with self._working:
            due = [] if self._stopped.is_set() else [node for node in self._nodes if node in self._due]
            self._due.difference_update(due)
            # Errors do not matter: hosts compile what they lack.
            found = for_each_host(self._take, due, self._stopped.is_set)
            new = {key for one in found if not isinstance(one, Raised) for key, size in [one] if size}
            others = [node for node in self._nodes if node not in due and self._keys.get(node) in (None, *new)]
            for_each_host(self._give, [*due, *others] if new else due, self._stopped.is_set)

    def _take(self, node: Node) -> tuple[str, int]:
        """Copies what is new of a host's kernels to this machine. Returns their key and size."""
        with self._open(node, "send") as (remote, key):
            if not key:
                return "", 0
            left = _MOST - sum(max(_LEAST, path.lstat().st_size) for path in _folder("").rglob("*"))
            numbers = itertools.count(1)
            with contextlib.closing(
                Target(os.fsencode(_folder(key)), expects=lambda path: next(numbers) * _LEAST <= left)
            ) as target:
                return key, _moved(remote, Here(target), min(left, target.room))

    def _give(self, node: Node) -> None:
        """Copies what a host lacks of the kernels on this machine."""
        with self._open(node, "receive") as (remote, key):
            if key and any(_folder(key).glob("*")):
                with contextlib.closing(Source(walk(os.fsencode(_folder(key)), b"", []), [])) as source:
                    _moved(Here(source), remote, _MOST)

    @contextlib.contextmanager
    def _open(self, node: Node, way: str) -> Iterator[tuple[Remote, str]]:
        """The source or target of a host's kernels, and their key. Raises ProtocolError for an invalid one."""
        with contextlib.closing(Remote(node, self._spec_of(node, ""), self._stopped)) as remote:
            key = check("compiled", remote.ask("compiled", way))
            if not re.fullmatch("([0-9a-f]{40})?", key):
                raise ProtocolError("invalid key of kernels", host=node.name)
            self._keys[node] = key
            yield remote, key


def _folder(key: str) -> Path:
    return made_cache() / "compiled" / key


def _moved(source: Side, target: Side, room: int) -> int:
    """Copies files; returns their bytes."""
    transfer = Transfer(source, target, lambda done, total: None)
    transfer.run(functools.partial(fits, room, ""))
    return transfer.report.sent_size
