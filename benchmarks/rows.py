"""The list of all benchmarks (rows of the table), in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from benchmarks.arena import Arena
from benchmarks.ask import Ask
from benchmarks.bulk import Bulk
from benchmarks.cold import Cold
from benchmarks.compiled import Compiled
from benchmarks.containers import Containers
from benchmarks.dask import Dask
from benchmarks.device import Device
from benchmarks.distance import Distance
from benchmarks.distributed import Distributed
from benchmarks.doctor import Doctor
from benchmarks.environment import Environment
from benchmarks.files import Files
from benchmarks.forward import Forward
from benchmarks.joblib_tasks import Joblib
from benchmarks.many import Many
from benchmarks.map import Map
from benchmarks.output import Lines
from benchmarks.ray import Ray
from benchmarks.reconnect import Reconnect
from benchmarks.relayed import Relayed
from benchmarks.result import Result
from benchmarks.streams import Streams
from benchmarks.sweep import Queue, Sweep
from benchmarks.top import Top
from benchmarks.warm import Warm


class Row(Protocol):
    """A benchmark. It may use all hosts of the arena, and must leave nothing running on them."""

    name: str
    about: str
    """What is measured, and what it is compared with."""

    def run(self, arena: Arena) -> Iterator[Result]:
        """Measures, and yields a line of the table for each figure. Raises Skip if that is not possible."""


ROWS: tuple[Row, ...] = (
    Warm(),
    Cold(),
    Map(),
    Joblib(),
    Streams(),
    Bulk(),
    Relayed(),
    Files(),
    Forward(),
    Lines(),
    Environment(),
    Distributed(),
    Reconnect(),
    Many(),
    Ask(),
    Top(),
    Containers(),
    Doctor(),
    Compiled(),
    Device(),
    Dask(),
    Ray(),
    Sweep(),
    Queue(),
)
ON_REQUEST: tuple[Row, ...] = (Distance(),)
"""Rows that are measured only if they are named."""
