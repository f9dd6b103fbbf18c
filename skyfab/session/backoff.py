"""Exponential backoff with jitter: how long to wait between attempts."""

from __future__ import annotations

import random
from dataclasses import dataclass


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
