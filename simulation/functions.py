"""The functions that simulated hosts run, and what they share with the simulation: all are in one process."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

BLOBS: Final[dict[str, memoryview]] = {}
"""The content of all stores, by name."""
PORTS: Final[dict[tuple[str, int], Any]] = {}
"""Who listens at the addresses of simulated hosts."""
RUNS: Final[Counter[int]] = Counter()
"""How often each item of a map was computed, by any host."""
_here: list[Any] = ["", {}]


def enter(host: str, info: Mapping[str, Any]) -> None:
    """The next function runs on this host, in a worker with this info."""
    _here[:] = host, info


def duration(chance: random.Random) -> float:
    """Seconds that a call takes: most are short, few take much longer."""
    return min(chance.lognormvariate(-2.0, 0.7), 4.0)


def rank() -> int:
    """The rank that runs it."""
    return int(_here[1]["rank"])


def square(item: int) -> int:
    """An item of a map."""
    RUNS[item] += 1
    return item * item
