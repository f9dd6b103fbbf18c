"""The watch: which descriptors are waited for, and who is called when one is ready."""

from __future__ import annotations

import select

TYPE_CHECKING = False  # a cold host has no time for `typing`
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

READ = select.POLLIN
WRITE = select.POLLOUT


_LONGEST = 3600.0
"""Seconds; the system cannot count much further."""


class Poller:
    """One `epoll`, or `poll` where there is none, with a callback for each descriptor."""

    def __init__(self) -> None:
        self._calls: dict[int, Callable[[], None]] = {}
        epoll = getattr(select, "epoll", None)
        self._poll: Any = epoll() if epoll else select.poll()
        self._unit = 1 if epoll else 1000

    def add(self, fd: int, events: int, call: Callable[[], None]) -> None:
        """Calls `call` whenever the descriptor is ready. Adding it again does nothing."""
        if fd not in self._calls:
            self._poll.register(fd, events)
            self._calls[fd] = call

    def drop(self, fd: int) -> None:
        """Before the descriptor is closed. Dropping it again does nothing."""
        if self._calls.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def __contains__(self, fd: int) -> bool:
        return fd in self._calls

    def wait(self, timeout: float) -> bool:
        """Waits for the first that is ready and calls all that are. False: none was."""
        ready = self._poll.poll(min(timeout, _LONGEST) * self._unit)
        for fd, _ in ready:
            call = self._calls.get(fd)
            if call is not None:  # one before it may have dropped it
                call()
        return bool(ready)
