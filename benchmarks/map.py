"""Benchmark: `map` of many tiny tasks on four hosts, against execnet."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.arena import Arena
from benchmarks.remote import square
from benchmarks.result import Bar, Result, Skip
from benchmarks.sample import alternate


class Map:
    name = "map"
    about = "1,000 tiny tasks by `map` over four hosts, against execnet over four ssh gateways"

    def run(self, arena: Arena) -> Iterator[Result]:
        items = range(arena.scale.tasks)
        right = [number * number for number in items]
        with arena.pool(*arena.hosts) as compute, _channels(arena) as channels:

            def ours() -> float:
                started = time.perf_counter()
                results = compute.map(square, items)
                return _checked(started, results, right)

            def execnet() -> float:
                started = time.perf_counter()
                results = _execnet_map(channels, items)
                return _checked(started, results, right)

            ours()
            execnet()  # warm-up
            taken, baseline = alternate(arena.scale.maps, ours, execnet)
        yield Result(
            row=self.name,
            what=f"{len(items):,} tasks on {len(arena.hosts)} hosts",
            unit="ms",
            ours=taken.each(lambda seconds: seconds * 1e3),
            baseline=baseline.each(lambda seconds: seconds * 1e3),
            against="execnet",
            bar=Bar(1.0),
        )


def _checked(started: float, results: list[int], right: list[int]) -> float:
    taken = time.perf_counter() - started
    assert results == right
    return taken


@contextmanager
def _channels(arena: Arena) -> Iterator[list[Any]]:
    """One execnet channel to a loop on each host, over ssh with the same options."""
    try:
        import execnet
    except ImportError:
        raise Skip("execnet is not installed") from None
    group = execnet.Group()
    with arena.ssh_config() as config:
        try:
            specs = [f"ssh={host.name}//ssh_config={config}//python={host.python}" for host in arena.hosts]
            yield [group.makegateway(spec).remote_exec(_SERVE) for spec in specs]
        finally:
            group.terminate(timeout=5)


_SERVE = """
for number in channel:
    channel.send(number * number)
"""


def _execnet_map(channels: list[Any], items: range) -> list[int]:
    """The fastest way with execnet: round-robin, with all items sent before the first reply is awaited."""
    turns = [channels[at % len(channels)] for at in range(len(items))]
    for channel, item in zip(turns, items, strict=True):
        channel.send(item)
    return [channel.receive() for channel in turns]
