"""How much memory of the client each host takes."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path
from typing import Final

import skyfab as sky
from simulation import functions
from simulation.world import World

_MOST: Final = 250
"""Hosts of the pool that is measured: tracing makes everything slow."""
_SKYFAB: Final = str(Path(sky.__file__).parent)
_BOTH: Final = (f"{_SKYFAB}/protocol/", f"{_SKYFAB}/host/")
"""What the client and the simulated hosts use: half of it is the client's."""


def of_a_host(hosts: int, seed: int) -> tuple[int, int]:
    """Bytes for each host of an open pool, and after its first broadcast and map.

    Counts what modules of skyfab have allocated, as `tracemalloc` finds it, and not what the simulation has.
    """
    world = World(min(hosts, _MOST), seed)
    count = len(world.hosts)
    found: list[int] = []

    def program() -> None:
        with world.pool(lease=20) as compute:
            found.append(_bytes())
            sky.function(functions.rank)() @ compute
            compute.map(sky.function(functions.square), range(3 * count))
            found.append(_bytes())

    tracemalloc.start()
    try:
        before = _bytes()
        world.run(program)
    finally:
        tracemalloc.stop()
    opened, used = ((after - before) // count for after in found)
    return opened, used


def _bytes() -> int:
    gc.collect()
    total = 0
    for one in tracemalloc.take_snapshot().statistics("filename"):
        name = one.traceback[0].filename
        if name.startswith(_SKYFAB):
            total += one.size // 2 if name.startswith(_BOTH) else one.size
    return total
