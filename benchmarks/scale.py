"""`Scale`: sizes and repetitions of all benchmarks, either enough for stable medians or a quick check (`TASTE`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The sizes and repetitions of all rows."""

    calls: int = 200
    """Calls in a block, on a warm pool."""
    blocks: int = 10
    cold: int = 10
    """Cold starts."""
    first: int = 3
    """Cold starts on a host with an empty cache."""
    tasks: int = 1000
    """Items of a map."""
    maps: int = 6
    size: int = 512
    """MiB of the large tensor."""
    bulk: int = 2
    one_way: int = 2
    relayed: int = 256
    """MiB of an object that several hosts get."""
    arrays: tuple[str, ...] = ("torch", "numpy")
    """The library of the tensor: the first of these that is installed."""
    values: int = 20_000
    """Values of a generator, and calls of an actor."""
    lines: int = 200_000
    """Lines that a function prints."""
    output: int = 3
    packages: tuple[str, ...] = ("torch", "numpy")
    """Packages of an environment."""
    extra: str = "colorama"
    """One more package."""
    builds: int = 1
    """Environments that are built each way: minutes, and far from their bars."""
    starts: int = 1
    """Starts up to the first step of DDP, and of clusters of Dask and Ray."""
    crews: int = 2
    """Sets of ranks whose steps are timed."""
    laps: int = 6
    """Laps of each of these sets, alternating with laps of plain ssh."""
    steps: int = 10
    """Steps of a lap."""
    away: tuple[float, ...] = (2.0, 4.0, 8.0)
    """Seconds for which a link drops all packets: less than until the connection is suspect, about that, and more."""
    cuts: int = 2
    """Number of such outages."""
    hosts: tuple[int, ...] = (1, 4, 16, 64)
    """Numbers of hosts of the pools."""
    openings: int = 2
    """Pools opened of each size."""
    broadcasts: int = 50
    items: int = 10_000
    """Items of a map, in each pool."""
    device: int = 5
    """Measurements of each figure of a remote device."""
    trainings: int = 2
    """Of a training step there, which takes long."""
    trained: int = 5
    """Steps of each."""
    distances: tuple[float, ...] = (0, 1, 20, 70)
    """Milliseconds that a round trip to a remote device takes longer."""
    there: str = "inductor"
    """What hosts do with compiled graphs."""
    files: int = 10_000
    """Files of a folder that is sent."""
    file: int = 512
    """MiB of the large file."""
    trips: int = 2
    """Transfers of each."""
    examined: int = 16
    """Hosts of an examination."""
    examinations: int = 3
    in_a_row: int = 40
    """Trials of a sweep, one after another."""
    sweeps: int = 3
    """Sweeps of these."""
    trials: int = 1000
    """Trials on all slots."""
    turns: int = 4
    """Runs that wait for the one before."""
    nodes: int = 4
    """Hosts of a cluster of Ray."""


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
    relayed=8,
    arrays=("numpy", "torch"),  # importing torch takes longer than all the rest
    values=200,
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
    device=1,
    trainings=1,
    trained=2,
    distances=(0, 5),
    there="eager",
    broadcasts=3,
    items=100,
    files=50,
    file=8,
    trips=1,
    examined=2,
    examinations=1,
    in_a_row=4,
    sweeps=1,
    trials=8,
    turns=1,
    nodes=1,
)
"""Runs everything in seconds: checks that the benchmarks work, not how fast skyfab is."""
