"""Benchmark: the first step of a compiled model on a host, after another host of the pool has compiled it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.util import find_spec

from benchmarks.arena import Arena
from benchmarks.remote import compiled_files, compiled_step
from benchmarks.result import Bar, Result, Skip
from benchmarks.sample import Sample

_PATIENCE = 30.0


class Compiled:
    name = "compiled"
    about = "the first step of a model under torch.compile on a second host, against that on the first one"

    def run(self, arena: Arena) -> Iterator[Result]:
        if find_spec("torch") is None:
            raise Skip("torch is not installed")
        with arena.pool(*arena.hosts[:2]) as compute:
            there, other = (node.name for node in compute.hosts)
            width = 64 + time.time_ns() % 4096  # a model that no cache has
            first = compute.submit(compiled_step(width), on=there).result()
            wanted = compute.submit(compiled_files(), on=there).result()
            until = time.monotonic() + _PATIENCE
            while compute.submit(compiled_files(), on=other).result() < wanted and time.monotonic() < until:
                time.sleep(0.1)
            second = compute.submit(compiled_step(width), on=other).result()
        yield Result(
            row=self.name,
            what="first compiled step, second host",
            unit="s",
            ours=Sample.of(second),
            baseline=Sample.of(first),
            against="first host",
            bar=Bar(0.3),
        )
