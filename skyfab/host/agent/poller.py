"""The agent's event loop primitive: waits for file descriptors and calls a callback for each that is ready."""

from __future__ import annotations

import select

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

READ = select.POLLIN
WRITE = select.POLLOUT


_LONGEST = 3600.0
"""Seconds. The system's timeouts have a limit."""


class Poller:
    """An `epoll`, or `poll` where there is none, with a callback for each descriptor."""

    def __init__(self) -> None:
        self._calls: dict[int, Callable[[], object]] = {}
        epoll = getattr(select, "epoll", None)
        self._poll: Any = epoll() if epoll else select.poll()
        self._unit = 1 if epoll else 1000

    def add(self, fd: int, events: int, call: Callable[[], object]) -> None:
        """Calls `call` whenever the descriptor is ready. Adding it again does nothing."""
        if fd not in self._calls:
            self._poll.register(fd, events)
            self._calls[fd] = call

    def drop(self, fd: int) -> None:
        """Removes a descriptor; call it before closing that. Dropping it again does nothing."""
        if self._calls.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def __contains__(self, fd: int) -> bool:
        return fd in self._calls

    def wait(self, timeout: float) -> bool:
        """Waits until some descriptor is ready, and runs the callbacks of all that are. Returns False on timeout."""
        ready = self._poll.poll(min(timeout, _LONGEST) * self._unit)
        for fd, _ in ready:
            call = self._calls.get(fd)
            if call is not None:  # an earlier callback may have dropped it
                call()
        return bool(ready)
