"""Packages that several hosts of a pool lack leave this machine once: the hosts pass them on to each other.

They arrive in the hosts' content stores, where missing.sh finds them. Afterwards, even if a relay fails, each host is
sent what it still lacks, as a single host is.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from skyfab.errors import SkyfabError
from skyfab.inventory.host import Host

if TYPE_CHECKING:
    from skyfab.env.install import Package, Report

_LOG: Final = logging.getLogger("skyfab")
LEAST: Final = 4 << 20
"""Bytes that several hosts must lack before they pass them on to each other."""
_LOOK: Final = 0.2
"""Seconds after which a waiting host checks whether the pool was closed."""
H = TypeVar("H")
T = TypeVar("T")


def by_hosts(lacking: Mapping[H, Iterable[T]]) -> dict[tuple[H, ...], list[T]]:
    """From what each host lacks: what each group of hosts lacks together.

    >>> by_hosts({"a": [1, 2, 3], "b": [1, 2]})
    {('a', 'b'): [1, 2], ('a',): [3]}
    """
    hosts: dict[T, list[H]] = {}
    for host, things in lacking.items():
        for thing in things:
            hosts.setdefault(thing, []).append(host)
    groups: dict[tuple[H, ...], list[T]] = {}
    for thing, those in hosts.items():
        groups.setdefault(tuple(those), []).append(thing)
    return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Files that go to the content stores of some hosts."""

    files: Mapping[str, Path]
    """By their sha256."""
    hosts: Sequence[Host]


class Sharing:
    """The hosts of a preparation meet here, once, before packages are sent to them."""

    def __init__(self, hosts: Sequence[Host], deliver: Deliver | None, patience: float) -> None:
        """A host waits at most `patience` seconds for what others lack. Without `deliver` it never waits."""
        self._deliver = deliver
        self._patience = patience
        self._undecided = {host.name for host in hosts if not (host.is_here or host.inside)}
        self._lacks: dict[Host, tuple[Sequence[Package], Report]] = {}
        self._expecting: set[str] = set()
        """Hosts that wait for what they lack."""
        self._has_begun = False
        self._changed = threading.Condition()

    def leave(self, host: Host) -> None:
        """A host does not take part."""
        with self._changed:
            self._undecided.discard(host.name)
            self._changed.notify_all()

    def share(self, host: Host, packages: Sequence[Package], report: Report, check: Callable[[], None]) -> bool:
        """Waits until all hosts have reported what they lack, then until this one has received what others lack too.

        Returns whether it may have received anything: not if it is too late, or repeated. `check` raises when the pool
        was closed.
        """
        name = host.name
        with self._changed:
            if self._deliver is None or self._has_begun or name not in self._undecided or not packages:
                return False
            self._lacks[host] = packages, report
            self._expecting.add(name)
            self.leave(host)
            until = time.monotonic() + self._patience
            try:
                while name in self._expecting:
                    if not self._has_begun and (not self._undecided or time.monotonic() > until):
                        self._has_begun = True
                        self._start(self._deliver)
                    self._changed.wait(_LOOK)
                    check()
            finally:
                self._expecting.discard(name)
        return True

    def _start(self, deliver: Deliver) -> None:
        try:
            threading.Thread(target=self._run, args=(deliver,), daemon=True).start()
        except RuntimeError as error:  # the system starts no more threads: each host is sent what it lacks
            _LOG.debug("packages are not relayed: %s", error)
            self._expecting.clear()
            self._changed.notify_all()

    def _run(self, deliver: Deliver) -> None:
        try:
            deliveries = self._deliveries()
            if sum(path.stat().st_size for each in deliveries for path in each.files.values()) >= LEAST:
                deliver(deliveries, self)
        except (SkyfabError, OSError) as error:  # if it persists, a host raises it when it is sent the same
            _LOG.debug("packages are not relayed: %s", error)
        finally:
            for host in self._lacks:
                self.settle(host)

    # ---- for the function that delivers

    @property
    def is_abandoned(self) -> bool:
        """Whether no host waits any longer."""
        return not self._expecting

    def moved(self, host: Host, done: int, total: int) -> None:
        """A host has received `done` of `total` bytes."""
        self._lacks[host][1].moved("pushing", done, total)

    def settle(self, host: Host) -> None:
        """A host gets nothing more from the relay."""
        with self._changed:
            self._expecting.discard(host.name)
            self._changed.notify_all()

    def _deliveries(self) -> list[Delivery]:
        """What several hosts lack: one delivery for each group of hosts that lack the same."""
        from skyfab.env.install import fetched  # late: most pools build no environment

        found = []
        for group, packages in by_hosts({host: some for host, (some, _) in self._lacks.items()}).items():
            if len(group) > 1:
                files = fetched(packages, functools.partial(self._fetching, group))
                content = {one.sha256: one.content for one in files if isinstance(one.content, Path)}
                found.append(Delivery(files=content, hosts=group))
        return found

    def _fetching(self, hosts: Sequence[Host], done: int, total: int) -> None:
        for host in hosts:
            self._lacks[host][1].moved("fetching", done, total)


Deliver = Callable[[Sequence[Delivery], Sharing], None]
"""Makes deliveries and reports their progress: a method of the pool."""
