"""How much is measured: enough for steady medians, or a taste."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The sizes and repetitions of all rows."""

    calls: int = 200
    """Warm calls in a block."""
    blocks: int = 10
    cold: int = 10
    """Cold starts."""
    first: int = 3
    """Cold starts on a host that has never seen skyfab."""
    tasks: int = 1000
    """Items of a map."""
    maps: int = 10
    size: int = 1024
    """MiB of the large tensor."""
    bulk: int = 5
    one_way: int = 2
    arrays: tuple[str, ...] = ("torch", "numpy")
    """Whose tensor it is: the first of these that is installed."""
    lines: int = 200_000
    """Lines that a rank prints."""
    output: int = 3
    packages: tuple[str, ...] = ("torch", "numpy")
    """What an environment consists of."""
    extra: str = "colorama"
    """One more."""
    builds: int = 3
    starts: int = 5
    """First steps of DDP."""
    crews: int = 3
    """Sets of ranks whose steps are timed."""
    laps: int = 10
    """What each of these runs, in turns with those of plain ssh."""
    steps: int = 10
    """Of a lap."""
    away: tuple[float, ...] = (2.0, 4.0, 8.0)
    """Seconds that a link loses every packet: less than it takes to doubt the connection, about as long, and more."""
    cuts: int = 5
    """How often it does."""
    hosts: tuple[int, ...] = (1, 4, 16, 64)
    """Sizes of pools."""
    openings: int = 3
    """Pools of each size."""
    broadcasts: int = 50
    items: int = 10_000
    """Of a map, in each."""


TASTE = Scale(
    calls=20,
    blocks=2,
    cold=1,
    first=1,
    tasks=40,
    maps=2,
    size=8,
    bulk=1,
    one_way=1,
    arrays=("numpy", "torch"),  # torch takes longer to import than all the rest
    lines=2000,
    output=1,
    packages=("colorama",),
    extra="iniconfig",
    builds=1,
    starts=1,
    crews=1,
    laps=1,
    steps=2,
    away=(1.0,),
    cuts=1,
    hosts=(1, 2),
    openings=1,
    broadcasts=3,
    items=100,
)
"""Seconds for everything: shows that the harness works, not how fast skyfab is."""
