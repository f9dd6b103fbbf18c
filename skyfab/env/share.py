"""Packages that several hosts of a pool lack leave this machine once: the hosts pass them on to each other.

They arrive in the hosts' content stores, where missing.sh finds them. Whatever goes wrong, each host is then sent what
it still lacks, as a single one is.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from skyfab.errors import SkyfabError
from skyfab.inventory.host import Host

if TYPE_CHECKING:
    from skyfab.env.install import Package, Report

_LOG: Final = logging.getLogger("skyfab")
_LEAST: Final = 4 << 20
"""Bytes that several hosts lack from which on they pass them on to each other."""
_LOOK: Final = 0.2
"""Seconds after which a waiting host checks whether the pool was closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Files that go to the content stores of some hosts."""

    files: Mapping[str, Path]
    """By their sha256."""
    hosts: Sequence[Host]


Deliver = Callable[[Sequence[Delivery], Callable[[Host, int, int], None], Callable[[], bool]], None]
"""Makes deliveries: a method of the pool. It reports progress, in bytes, and ends early when a function says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """What one host lacks."""

    host: Host
    packages: Sequence[Package]
    report: Report


class Sharing:
    """The hosts of a preparation meet here, once, before packages are sent to them."""

    def __init__(self, hosts: Sequence[Host], deliver: Deliver | None, patience: float) -> None:
        """A host waits at most `patience` seconds for the others. Without `deliver` it never waits."""
        self._deliver = deliver
        self._patience = patience
        self._undecided = {host.name for host in hosts if not (host.is_here or host.inside)}
        self._lacks: list[Lack] = []
        self._waiting = 0
        self._has_begun = self._has_ended = False
        self._changed = threading.Condition()

    def leave(self, host: Host) -> None:
        """A host does not take part."""
        with self._changed:
            self._undecided.discard(host.name)
            self._changed.notify_all()

    def share(self, lack: Lack, check: Callable[[], None]) -> bool:
        """Waits until all hosts have said what they lack, and then until they have received what several of them do.

        Returns whether the host may have received something: not if it comes too late, or again. `check` raises when the
        pool was closed.
        """
        with self._changed:
            if self._deliver is None or self._has_begun or lack.host.name not in self._undecided or not lack.packages:
                return False
            self._lacks.append(lack)
            self.leave(lack.host)
            self._waiting += 1
            try:
                until = time.monotonic() + self._patience
                while not self._has_begun and self._undecided and time.monotonic() < until:
                    self._changed.wait(_LOOK)
                    check()
                if not self._has_begun:
                    self._has_begun = True
                    threading.Thread(target=self._run, args=(self._deliver,), daemon=True).start()
                while not self._has_ended:
                    self._changed.wait(_LOOK)
                    check()
            finally:
                self._waiting -= 1
        return True

    def _run(self, deliver: Deliver) -> None:
        reports = {lack.host: lack.report for lack in self._lacks}
        try:
            deliveries = self._deliveries()
            if sum(path.stat().st_size for each in deliveries for path in each.files.values()) >= _LEAST:
                deliver(
                    deliveries,
                    lambda host, done, total: reports[host].moved("pushing", done, total),
                    lambda: not self._waiting,
                )
        except (SkyfabError, OSError) as error:  # a host fails with it again if it is sent the same
            _LOG.debug("packages are not relayed: %s", error)
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _deliveries(self) -> list[Delivery]:
        """What several hosts lack; one delivery for those that lack the same."""
        from skyfab.env.install import fetched  # late: most pools build no environment

        lacking: dict[Package, list[Host]] = {}
        for lack in self._lacks:
            for package in lack.packages:
                lacking.setdefault(package, []).append(lack.host)
        groups: dict[tuple[Host, ...], list[Package]] = {}
        for package, hosts in lacking.items():
            if len(hosts) > 1:
                groups.setdefault(tuple(hosts), []).append(package)
        found = []
        for hosts, packages in groups.items():
            progress = functools.partial(self._fetching, hosts)
            files = {one.sha256: one.content for one in fetched(packages, progress) if isinstance(one.content, Path)}
            found.append(Delivery(files=files, hosts=hosts))
        return found

    def _fetching(self, hosts: Sequence[Host], done: int, total: int) -> None:
        for lack in self._lacks:
            if lack.host in hosts:
                lack.report.moved("fetching", done, total)
