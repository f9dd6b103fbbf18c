"""Timing: how long a connection waits for what."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

HEARTBEAT: Final = 1.0
SUSPECT_AFTER: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds, and the clock that counts them."""

    lease: float
    """How long a host keeps what runs there without hearing from this side."""
    heartbeat_timeout: float = 10.0
    """Without a heartbeat for so long a host is lost, when other hosts respond."""
    heartbeat: float = field(default_factory=lambda: HEARTBEAT)
    """Between two heartbeats."""
    suspect_after: float = field(default_factory=lambda: SUSPECT_AFTER)
    """Without a heartbeat for so long, other connections are attempted."""
    clock: Callable[[], float] = time.monotonic

    @property
    def interval(self) -> float:
        """Between two heartbeats, where the lease is short too."""
        return min(self.heartbeat, self.lease / 4) if self.lease else self.heartbeat
