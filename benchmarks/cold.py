"""Benchmark: cold start, from opening a pool to the first result on a host where nothing of skyfab runs."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace

import skyfab as sky
from benchmarks.arena import Arena
from benchmarks.remote import nothing
from benchmarks.result import Bar, Result
from benchmarks.sample import Sample, alternate
from skyfab.inventory.host import Host

_PROJECT = sky.Image(excludes=["/tests/", "/skyfab/", "/examples/", "/tools/", "/docs/"])
"""A project as a user's program has one: without it, the size of this repository would be measured."""


class Cold:
    name = "cold"
    about = "from Compute(…) to the first result on a host where nothing runs, against `ssh host python -c pass`"

    def run(self, arena: Arena) -> Iterator[Result]:
        host = arena.first
        with arena.ssh(host, f"{shlex.quote(host.python)} -c pass") as argv:

            def python() -> float:
                started = time.perf_counter()
                subprocess.run(argv, stdin=subprocess.DEVNULL, check=True)
                return time.perf_counter() - started

            first = Sample(tuple(_start(arena, _stranger(host, n)) for n in range(arena.scale.first)))
            _start(arena, host)
            python()
            ours, baseline = alternate(arena.scale.cold, lambda: _start(arena, host), python)
        result = Result(
            row=self.name,
            what="first result, nothing running there",
            unit="s",
            ours=ours,
            baseline=baseline,
            against="ssh python -c pass",
            bar=Bar(1.5),
        )
        yield result
        yield replace(result, what="first result ever, nothing sent yet", ours=first, bar=Bar(3.0))


def _start(arena: Arena, host: Host) -> float:
    started = time.perf_counter()
    with arena.pool(host, image=_PROJECT) as compute:
        nothing() >> compute
        return time.perf_counter() - started


def _stranger(host: Host, number: int) -> Host:
    """The host with an empty cache, as if skyfab had never been used there."""
    return replace(host, cache=f"{host.cache}/first{number}")
