"""The timeouts and intervals of a connection, and the growing pauses between attempts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

HEARTBEAT: Final = 1.0
SUSPECT_AFTER: Final = 3.0
EXIT: Final = 0.5
"""Seconds that an agent has to exit after its goodbye. A login script may have left processes that do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """All values in seconds, and the clock that they refer to."""

    lease: float
    """How long a host keeps its processes without receiving anything from this side."""
    heartbeat_timeout: float = float("inf")
    """A host is lost after this time without a heartbeat, while other hosts respond; by default only by the lease."""
    heartbeat: float = field(default_factory=lambda: HEARTBEAT)
    """Time between two heartbeats."""
    suspect_after: float = field(default_factory=lambda: SUSPECT_AFTER)
    """New streams are attempted after this time without a heartbeat."""
    clock: Callable[[], float] = time.monotonic

    @property
    def interval(self) -> float:
        """Time between two heartbeats; at most a quarter of the lease."""
        return min(self.heartbeat, self.lease / 4) if self.lease else self.heartbeat


@dataclass(slots=True)
class Backoff:
    """Waits that grow from `first` to `longest`; each is randomly varied by the fraction `jitter`."""

    first: float
    longest: float
    factor: float = 1.5
    jitter: float = 0.0

    def next(self) -> float:
        """Returns the seconds to wait now; the next wait is longer."""
        seconds, self.first = self.first, min(self.longest, self.first * self.factor)
        return seconds * random.uniform(1 - self.jitter, 1 + self.jitter) if self.jitter else seconds
