"""Benchmark: generators and actors, against plain calls and one large result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import skyfab as sky
from benchmarks.arena import Arena
from benchmarks.bulk import Cargo
from benchmarks.remote import Counter, count, make, nothing, pieces
from benchmarks.result import Bar, Result
from benchmarks.sample import Sample, alternate, times

_PIECE = 16 * 1024**2


class Streams:
    name = "streams"
    about = "values of a generator and calls of an actor, against a plain call and one large result"

    def run(self, arena: Arena) -> Iterator[Result]:
        scale = arena.scale
        with arena.pool(arena.first) as compute:
            counter = compute.actor(Counter)

            def each(action: Callable[[], object]) -> Callable[[], float]:
                return lambda: Sample(tuple(times(action, scale.calls))).median

            def first() -> float:
                return Sample(tuple(_first_values(compute, scale.calls))).median

            call = each(lambda: nothing() >> compute)
            for warm_up in (first, call, each(counter.add)):
                warm_up()
            yield self._latency("first value", alternate(scale.blocks, first, call), Bar(1.5))
            yield self._latency("call of an actor", alternate(scale.blocks, each(counter.add), call), Bar(1.2))
            yield self._rate(
                "small values", lambda: _values(compute, scale.values), scale, Bar(20_000, "at least", "value")
            )
            yield self._rate(
                "submitted calls of an actor",
                lambda: _submitted(counter, scale.values),
                scale,
                Bar(15_000, "at least", "value"),
            )
            yield self._bulk(arena, compute)

    def _latency(self, what: str, seconds: tuple[Sample, ...], bar: Bar) -> Result:
        ours, baseline = (taken.each(lambda each: each * 1e3) for taken in seconds)
        return Result(row=self.name, what=what, unit="ms", ours=ours, baseline=baseline, against="no-op >>", bar=bar)

    def _rate(self, what: str, measure: Callable[[], float], scale: Any, bar: Bar) -> Result:
        [taken] = alternate(scale.maps, measure)
        return Result(row=self.name, what=what, unit="/s", ours=taken, bar=bar)

    def _bulk(self, arena: Arena, compute: sky.Compute) -> Result:
        cargo = Cargo.load(arena.scale.size * 1024**2, arena.scale.arrays)
        library = cargo.library.__name__

        def streamed() -> float:
            started = time.perf_counter()
            found = sum(piece.nbytes for piece in pieces(cargo.size, _PIECE, library) >> compute)
            assert found == cargo.size
            return found / (time.perf_counter() - started) / 1e6

        def whole() -> float:
            started = time.perf_counter()
            found = (make(cargo.size, library) >> compute).nbytes
            return float(found / (time.perf_counter() - started) / 1e6)

        streamed()
        whole()
        ours, baseline = alternate(arena.scale.bulk, streamed, whole)
        return Result(
            row=self.name,
            what=f"{cargo.size // 1024**2} MiB as values of {_PIECE // 1024**2} MiB",
            unit="MB/s",
            ours=ours,
            baseline=baseline,
            against="one result",
            bar=Bar(0.9, "at least"),
        )


def _first_values(compute: sky.Compute, calls: int) -> Iterator[float]:
    for _ in range(calls):
        started = time.perf_counter()
        values = count(1) >> compute
        next(values)
        yield time.perf_counter() - started
        assert list(values) == []


def _values(compute: sky.Compute, number: int) -> float:
    started = time.perf_counter()
    assert sum(1 for _ in count(number) >> compute) == number
    return number / (time.perf_counter() - started)


def _submitted(counter: Any, number: int) -> float:
    started = time.perf_counter()
    for future in [counter.add.submit() for _ in range(number)]:
        future.result()
    return number / (time.perf_counter() - started)
