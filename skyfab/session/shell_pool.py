"""Shells: one on each of some hosts, opened when it is asked something, kept, and opened anew when it broke.

Whoever looks at hosts again and again logs in once.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from skyfab.errors import HostLost, HostUnfit, SkyfabError, Unreachable
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.session.bootstrap import open_shell
from skyfab.session.fanout import Raised, for_each_host
from skyfab.session.shell import ScriptFailed, Shell
from skyfab.session.transport import transport_for

PassingError = HostLost | Unreachable
T = TypeVar("T")

PASSING: Final = (HostLost, Unreachable)
"""Errors that may be over the next time."""
_PAUSE: Final = 0.5
"""Seconds for which a host that could not be asked is left alone, the first time."""
_LONGEST: Final = 15.0
"""What they grow to."""
_QUIET: Final = 60.0
"""Seconds without a word after which a shell is given up."""


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
        """Nobody is waited for past `until`. `trouble` is told when a host stops answering, once each time."""
        self.hosts = hosts
        self._inventory = inventory
        self._until = until
        self._trouble = trouble
        self._closed = False
        self._entries = {host.name: _Entry() for host in hosts}

    def __enter__(self) -> Shells:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True  # threads that still ask stop by themselves
        for_each_host(_Entry.end, [entry for entry in self._entries.values() if entry.shell is not None])

    def _is_over(self) -> bool:
        return self._closed or time.monotonic() > self._until

    def ask(self, question: Callable[[Shell], T], errors: list[SkyfabError] | None = None) -> list[T]:
        """Asks all of them at once. Raises the first failure, unless they are to be collected."""

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
        """The host's shell, for one at a time. One that could not be had, or broke, is left alone for a while.

        Raises a HostError; the same again while it is left alone.
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
                if entry.fail(error) and self._trouble is not None:
                    self._trouble(error)
                raise
            except BaseException:  # what it has answered, and what not, nobody knows
                entry.close()
                raise
            entry.error = None

    def _open(self, entry: _Entry, host: Host) -> Shell:
        shell = open_shell(host, transport_for(host, self._inventory), stopped=self._is_over, quiet=_QUIET)
        entry.shell = entry.stack.enter_context(shell)
        if self._is_over():
            raise HostLost("nobody waits for it any more", host=host.name)
        return entry.shell


class _Entry:
    """One host's shell, if it has one, and how it went the last time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.shell: Shell | None = None
        self.stack = contextlib.ExitStack()
        """What closes it."""
        self.error: PassingError | None = None
        self.until = 0.0
        """When it may be tried again."""
        self._pause = _PAUSE

    def fail(self, error: PassingError) -> bool:
        """Notes a failure. True: it is the first in a row."""
        first = self.error is None
        self._pause = _PAUSE if first else min(_LONGEST, 1.5 * self._pause)
        self.error, self.until = error, time.monotonic() + self._pause * random.uniform(0.7, 1.3)
        self.close()
        return first

    def close(self) -> None:
        self.shell = None
        self.stack.close()

    def end(self) -> None:
        """Whoever asks it just now stops in a moment; one that does not is left to its own end."""
        if self.lock.acquire(timeout=1):
            try:
                self.close()
            finally:
                self.lock.release()
