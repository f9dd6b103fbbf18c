"""The jobs: what is measured, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers import work


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    name: str
    what: str
    """For the table and the chart; {} stands for the number or the size that the scale gives."""
    unit: str = "s"
    rounds: int = 2
    """How many times each contestant takes its turn."""
    repeats: int = 1
    """Measurements in a session, in each of its turns."""
    warm: bool = False
    """It is asked for in a session, which is connected already; otherwise it is a whole program."""

    def number(self, seconds: float) -> float:
        return seconds * 1e3 if self.unit == "ms" else seconds


PROGRAMS: Sequence[Job] = (
    Job(name="command", what="one command on one host", rounds=5),
    Job(name="commands", what=f"one command on {work.MANY} hosts", rounds=3),
    Job(name="file", what=f"a file of {{file}} MiB to {work.HOSTS} hosts", rounds=2),
    Job(name="folder", what="a folder of {files:,} small files to one host", rounds=3),
    Job(name="gang", what=f"a gloo process group of {work.RANKS} ranks on {work.RANKS} hosts", rounds=2),
)
"""Timed from the start of the program to its end."""
SESSIONS: Sequence[Job] = (
    Job(name="calls", what="{calls:,} Python calls in a row on one host", warm=True),
    Job(name="everywhere", what=f"one Python call on each of {work.HOSTS} hosts", unit="ms", repeats=10, warm=True),
    Job(name="map", what=f"{{tasks:,}} tiny tasks on {work.HOSTS} hosts", repeats=3, warm=True),
    Job(name="array", what="a numpy array of {array} MiB to a function and back", repeats=2, warm=True),
)
"""After connecting, and a little warm-up; all of them in one session of each contestant, in every round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    calls: int = 1000
    tasks: int = 2000
    array: int = 256
    """MiB, as `file`."""
    file: int = 256
    files: int = 2000
    rounds: int | None = None
    """For all jobs, instead of their own."""


TASTE = Size(calls=20, tasks=40, array=1, file=1, files=20, rounds=1)
"""Shows in seconds that everything works, not how fast anything is."""
