"""Benchmark: how time and memory of a pool grow with the number of hosts, from 1 to 64."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import skyfab as sky
from benchmarks.arena import Arena
from benchmarks.remote import nothing, square
from benchmarks.result import Bar, Result
from benchmarks.sample import Sample
from benchmarks.scale import Scale
from skyfab.inventory.host import Host

_OWN = "next @, this program's own time"
_BARS = {"open": Bar(40), "next @": Bar(50), _OWN: Bar(30)}
"""Limits for the largest pool, as ratios to one host. The processes of all hosts share the processors of this machine,
so a broadcast takes longer here than with hosts that have their own. What remains then is this program's own time.
"""
_MEMORY = Bar(3.0, on="value")


class Many:
    name = "hosts"
    about = "open, first @, next @, map and close at 1, 4, 16 and 64 hosts, against one; memory and threads here"

    def run(self, arena: Arena) -> Iterator[Result]:
        crowd = arena.crowd()
        taken = _taken(crowd)
        weights = [_weight(crowd, count) for count in (1, max(arena.scale.hosts))]
        for step in next(iter(taken.values())):
            for count, laps in taken.items():
                yield _result(self.name, step, count, laps[step], taken[1][step], arena.scale)
        yield from _weighed(self.name, *weights)


def _taken(crowd: Arena) -> dict[int, dict[str, Sample]]:
    """The seconds of each step, by number of hosts. Pool sizes alternate, so that disturbances affect all of them."""
    for host in _batches(crowd.hosts):  # warm-up: fills the hosts' caches before the measurement
        _lap(crowd, host)
    laps: dict[int, list[dict[str, float]]] = {count: [] for count in crowd.scale.hosts}
    for _ in range(crowd.scale.openings):
        for count, found in laps.items():
            found.append(_lap(crowd, crowd.hosts[:count]))
    return {
        count: {step: Sample(tuple(lap[step] for lap in found)) for step in found[0]} for count, found in laps.items()
    }


def _batches(hosts: Sequence[Host]) -> list[Sequence[Host]]:
    return [hosts[at : at + 16] for at in range(0, len(hosts), 16)]


def _lap(crowd: Arena, hosts: Sequence[Host]) -> dict[str, float]:
    scale = crowd.scale
    compute = crowd.pool(*hosts)
    items = range(scale.items)
    seconds = {"open": _seconds(compute.open)}
    try:
        seconds["first @"] = _seconds(lambda: nothing() @ compute)
        own = time.process_time()
        seconds["next @"] = median(_seconds(lambda: nothing() @ compute) for _ in range(scale.broadcasts))
        seconds[_OWN] = (time.process_time() - own) / scale.broadcasts
        _map(compute, items)  # warm-up: the first one starts the workers for solo calls
        seconds[f"map of {scale.items:,}"] = _seconds(lambda: _map(compute, items))
    finally:
        seconds["close"] = _seconds(compute.close)
    return seconds


def _map(compute: sky.Compute, items: range) -> None:
    assert compute.map(square, items) == [number * number for number in items]


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _result(row: str, step: str, count: int, ours: Sample, one: Sample, scale: Scale) -> Result:
    alone = count == 1
    return Result(
        row=row,
        what=f"{step}, {count} host{'s' if count > 1 else ''}",
        unit="ms",
        ours=ours.each(lambda seconds: seconds * 1e3),
        baseline=None if alone else one.each(lambda seconds: seconds * 1e3),
        against="" if alone else "one host",
        bar=_BARS.get(step) if count == max(scale.hosts) and not alone else None,
    )


def _weight(crowd: Arena, count: int) -> dict[str, float]:
    """Memory, threads and files of a separate program with a pool of `count` hosts."""
    command = [sys.executable, "-m", "benchmarks.weight", str(crowd.lab.inventory), str(count)]
    found: dict[str, float] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return found


def _weighed(row: str, one: dict[str, float], all_: dict[str, float]) -> Iterator[Result]:
    """The cost per host: from the difference between a program with one host and one with all of them."""
    more = max(1.0, all_["hosts"] - one["hosts"])
    each = {name: Sample.of((all_[name] - one[name]) / more) for name in one}
    yield Result(row=row, what="memory of this program, per host", unit="MB", ours=each["own"], bar=_MEMORY)
    yield Result(row=row, what="memory of its ssh, per host (shared pages divided)", unit="MB", ours=each["ssh"])
    yield Result(row=row, what="threads, per host", unit="", ours=each["threads"])
    yield Result(row=row, what="open files, per host", unit="", ours=each["files"])
