"""Benchmark: latency of a no-op call on a warm pool, which is skyfab's own overhead."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.arena import Arena
from benchmarks.facts import OPTIMIZED
from benchmarks.pipe import Pipe
from benchmarks.remote import nothing
from benchmarks.result import Bar, Result
from benchmarks.sample import Sample, alternate, times

_MESSAGE = b"x" * 64
_BAR = Bar(3.5 if OPTIMIZED else 4.5)
"""Three Python programs take part: this one, the agent and the worker. Separate paths for small calls in the agent and
the worker would save an eighth (3.0); they were not worth a second implementation of what these do.
In the baseline, `cat` and ssh are not Python: a Python without optimizations makes only ours slower, by a quarter.
"""


class Warm:
    name = "warm"
    about = "a call that does nothing, against one small message through the same ssh to `cat` and back"

    def run(self, arena: Arena) -> Iterator[Result]:
        scale = arena.scale
        every: list[float] = []
        with arena.pool(arena.first) as compute, arena.ssh(arena.first, "exec cat") as argv, Pipe(argv) as pipe:

            def calls() -> float:
                block = Sample(tuple(times(lambda: nothing() >> compute, scale.calls)))
                every.extend(block.values)
                return block.median

            def echoes() -> float:
                return Sample(tuple(times(lambda: pipe.echo(_MESSAGE), scale.calls))).median

            calls()
            echoes()  # warm-up
            every.clear()
            ours, baseline = alternate(scale.blocks, calls, echoes)
        millis = [sample.each(lambda seconds: seconds * 1e3) for sample in (ours, baseline)]
        yield Result(
            row=self.name,
            what="no-op >>",
            unit="ms",
            ours=millis[0],
            baseline=millis[1],
            against="raw echo",
            bar=_BAR,
        )
        worst = Sample.of(Sample(tuple(every)).percentile(99) * 1e3)
        yield Result(row=self.name, what="no-op >>, 99 % below", unit="ms", ours=worst)
