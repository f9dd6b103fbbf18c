"""The lease: how long an agent goes on without its client.

A program that has ended is not a network that went away. When a program ends, its ssh closes the link's input in good
order while the output, or at least the sshd, stays, and the client does not come back: ten seconds are enough. When a
connection breaks, all are gone at once, and when a network goes away, none is: then the client may come back, and has
its whole lease.
"""

from __future__ import annotations

import time

TYPE_CHECKING = False  # a cold host has no time for `typing`
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Final

_FIRST: Final = 30.0
"""Seconds to wait for the first hello, which says how long later silences may be."""
_ENDED: Final = 10.0
"""Seconds to wait for a program that has ended: it may only have looked so, and then is back within moments."""


class Lease:
    """Seconds without a client, and why."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds = _FIRST
        self._alone_since = clock()
        self._ended = False

    def agree(self, seconds: float) -> None:
        """The client has said how long its silences may be."""
        self._seconds = seconds

    def disconnected(self) -> None:
        """There is no connection any more."""
        self._alone_since = self._clock()
        self._ended = False

    def program_ended(self) -> None:
        """The connection ended because the client's program did."""
        self._ended = True

    @property
    def is_program_ended(self) -> bool:
        """The program has ended, as far as can be seen."""
        return self._ended

    @property
    def seconds(self) -> float:
        """How long to wait, as things are."""
        return min(self._seconds, _ENDED) if self._ended else self._seconds

    def until(self, heard: float | None) -> float:
        """When it runs out, unless the client is heard before; `heard` is when it last was, where it is connected."""
        return self._alone_since + self.seconds if heard is None else heard + self._seconds
