"""A pool of shells, one for each host: opened on first use, kept open, and reopened after a failure.

A caller that polls hosts repeatedly logs in only once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from skyfab.errors import HostLost, HostUnfit, SkyfabError, Unreachable
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.session.backoff import Backoff
from skyfab.session.bootstrap import open_shell
from skyfab.session.fanout import Raised, for_each_host
from skyfab.session.shell import ScriptFailed, Shell
from skyfab.ssh import transport_for

PassingError = HostLost | Unreachable
T = TypeVar("T")

PASSING: Final = (HostLost, Unreachable)
"""Errors that a retry may resolve."""
_PAUSE: Final = 0.5
"""Seconds before a host is retried after its first failure."""
_LONGEST: Final = 15.0
"""The maximum that these seconds grow to."""
_QUIET: Final = 60.0
"""Seconds without output after which a shell is given up."""


class Shells:
    """A shell on each host."""

    def __init__(
        self,
        hosts: Sequence[Host],
        inventory: Inventory,
        *,
        until: float = float("inf"),
        trouble: Callable[[SkyfabError], None] | None = None,
    ) -> None:
        """Waits end at `until`. `trouble` is called once whenever a host stops responding."""
        self.hosts = hosts
        self._inventory = inventory
        self._until = until
        self._trouble = trouble
        self._closed = False
        self._entries = {host.name: _Entry() for host in hosts}

    def __enter__(self) -> Shells:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True  # threads that still wait for a host stop by themselves
        for_each_host(_Entry.end, [entry for entry in self._entries.values() if entry.shell is not None])

    def _is_over(self) -> bool:
        return self._closed or time.monotonic() > self._until

    def ask(self, question: Callable[[Shell], T], errors: list[SkyfabError] | None = None) -> list[T]:
        """Runs `question` on all hosts in parallel. Raises the first failure, unless `errors` collects them."""

        def one(host: Host) -> T:
            with self.on(host) as shell:
                return question(shell)

        found = []
        for outcome in for_each_host(one, self.hosts):
            if not isinstance(outcome, Raised):
                found.append(outcome)
            elif errors is not None and isinstance(outcome.error, SkyfabError):
                errors.append(outcome.error)
            else:
                raise outcome.error
        return found

    @contextlib.contextmanager
    def on(self, host: Host) -> Iterator[Shell]:
        """The host's shell, for one thread at a time. After a failure, the host is not retried for a while.

        Raises a HostError; the same one again during that time.
        """
        entry = self._entries[host.name]
        with entry.lock:
            if entry.error is not None and time.monotonic() < entry.until:
                raise entry.error.with_traceback(None)
            try:
                yield entry.shell or self._open(entry, host)
            except ScriptFailed as failed:
                said = failed.output.strip()[-400:] or f"exit code {failed.status}"
                raise HostUnfit(f"its shell could not do it: {said}", host=host.name) from failed
            except PASSING as error:
                if entry.fail(error) and self._trouble is not None and not self._is_over():
                    self._trouble(error)
                raise
            except BaseException:  # it is unknown how much of the reply was read
                entry.close()
                raise
            entry.error = None

    def _open(self, entry: _Entry, host: Host) -> Shell:
        shell = open_shell(host, transport_for(host, self._inventory), stopped=self._is_over, quiet=_QUIET)
        entry.shell = entry.stack.enter_context(shell)
        if self._is_over():
            raise HostLost("no caller waits for it any more", host=host.name)
        return entry.shell


class _Entry:
    """One host's shell, if it is open, and the result of its last use."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.shell: Shell | None = None
        self.stack = contextlib.ExitStack()
        """Closes the shell."""
        self.error: PassingError | None = None
        self.until = 0.0
        """When the host may be retried."""
        self._waits = Backoff(_PAUSE, _LONGEST, jitter=0.3)

    def fail(self, error: PassingError) -> bool:
        """Records a failure. True: it is the first in a row."""
        first = self.error is None
        if first:
            self._waits = Backoff(_PAUSE, _LONGEST, jitter=0.3)
        self.error, self.until = error, time.monotonic() + self._waits.next()
        self.close()
        return first

    def close(self) -> None:
        self.shell = None
        self.stack.close()

    def end(self) -> None:
        """Closes the shell. A thread that uses it stops soon; if it does not, the shell is left to that thread."""
        if self.lock.acquire(timeout=1):
            try:
                self.close()
            finally:
                self.lock.release()
