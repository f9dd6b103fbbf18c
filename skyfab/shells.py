"""Shells: one on each of some hosts, opened when it is asked something, kept, and opened anew when it broke."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from skyfab.errors import HostUnfit, SkyfabError
from skyfab.inventory import Host, Inventory
from skyfab.launch import open_shell
from skyfab.shell import ScriptFailed, Shell
from skyfab.transport import transport_for

S = TypeVar("S")
T = TypeVar("T")

_PAUSE: Final = 0.5
_LONGEST: Final = 15.0
"""Seconds for which a host that could not be asked is left alone: the first time, and what they grow to."""
_QUIET: Final = 60.0
"""Seconds without a word after which a shell is given up."""


class Shells:
    """Whoever looks at hosts again and again logs in once."""

    def __init__(
        self, hosts: Sequence[Host], inventory: Inventory, trouble: Callable[[SkyfabError], None] | None = None
    ) -> None:
        """`trouble` is told when a host stops answering, once each time."""
        self.hosts = hosts
        self._inventory = inventory
        self._trouble = trouble
        self._entries = {host.name: _Entry() for host in hosts}

    def __enter__(self) -> Shells:
        return self

    def __exit__(self, *_: object) -> None:
        _side_by_side(_Entry.close, list(self._entries.values()))

    def ask(self, question: Callable[[Host, Shell], T], errors: list[SkyfabError] | None = None) -> list[T]:
        """Asks all of them at once. Raises the first failure, unless they are to be collected."""

        def one(host: Host) -> T:
            with self.on(host) as shell:
                return question(host, shell)

        found = []
        for answer, error in _side_by_side(one, self.hosts):
            if error is None:
                found.append(answer)
            elif errors is None or not isinstance(error, SkyfabError):
                raise error
            else:
                errors.append(error)
        return found

    @contextlib.contextmanager
    def on(self, host: Host) -> Iterator[Shell]:
        """The host's shell. One that could not be had, or breaks, is left alone for a while: its error is raised again.

        Raises a HostError.
        """
        entry = self._entries[host.name]
        if entry.error is not None and time.monotonic() < entry.until:
            raise entry.error
        try:
            if entry.shell is None:
                entry.open(host, self._inventory)
                assert entry.shell is not None
            yield entry.shell
        except ScriptFailed as failed:
            said = failed.output.strip()[-400:] or f"exit code {failed.status}"
            raise HostUnfit(f"its shell could not do it: {said}", host=host.name) from failed
        except SkyfabError as error:
            if entry.failed(error) and self._trouble is not None:
                self._trouble(error)
            raise
        entry.error = None


class _Entry:
    """One host's shell, if it has one, and how it went the last time."""

    def __init__(self) -> None:
        self.shell: Shell | None = None
        self.error: SkyfabError | None = None
        self.until = 0.0
        self._pause = _PAUSE
        self._stack = contextlib.ExitStack()

    def open(self, host: Host, inventory: Inventory) -> None:
        self.shell = self._stack.enter_context(open_shell(host, transport_for(host, inventory), quiet=_QUIET))

    def failed(self, error: SkyfabError) -> bool:
        """True: it went well until now."""
        first = self.error is None
        self._pause = _PAUSE if first else min(_LONGEST, 1.5 * self._pause)
        self.error, self.until = error, time.monotonic() + self._pause * random.uniform(0.7, 1.3)
        self.close()
        return first

    def close(self) -> None:
        self.shell = None
        self._stack.close()


def _side_by_side(action: Callable[[S], T], items: Sequence[S]) -> list[tuple[T, BaseException | None]]:
    """What became of each. On threads that nobody has to wait for, should there be a Ctrl-C."""
    outcomes: list[Any] = [(None, None)] * len(items)

    def one(place: int) -> None:
        try:
            outcomes[place] = (action(items[place]), None)
        except BaseException as error:
            outcomes[place] = (None, error)

    threads = [threading.Thread(target=one, args=(place,), daemon=True) for place in range(len(items))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes
