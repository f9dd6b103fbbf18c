"""The lease: how long an agent waits for its client before it exits.

The time depends on whether the client program has ended or the network has failed. When a program ends, its ssh closes
the link's input in order while the output, or at least the sshd, stays, and the client does not reconnect: ten seconds
are enough. When a connection breaks, input, output and sshd are lost at once; when a network fails without notice,
none is. In both cases the client may reconnect, and has its whole lease to do so.
"""

from __future__ import annotations

import time

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Final

_FIRST: Final = 30.0
"""Seconds to wait for the first hello, which sets the lease for later interruptions."""
_ENDED: Final = 10.0
"""Seconds to wait after a program seems to have ended. If it has not, it reconnects within moments."""


class Lease:
    """Tracks how long no client has been connected, and why."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds = _FIRST
        self._alone_since = clock()
        self.is_program_ended = False
        """The connection ended because the client's program did, as it seems."""

    def agree(self, seconds: float) -> None:
        """Sets the lease that the client has requested."""
        self._seconds = seconds

    def disconnected(self) -> None:
        """The connection was lost."""
        self._alone_since = self._clock()
        self.is_program_ended = False

    @property
    def seconds(self) -> float:
        """How long to wait for the client in the current state."""
        return min(self._seconds, _ENDED) if self.is_program_ended else self._seconds

    def until(self, heard: float | None) -> float:
        """When the lease expires. `heard` is when the last frame was received; None if no client is connected."""
        return self._alone_since + self.seconds if heard is None else heard + self._seconds
