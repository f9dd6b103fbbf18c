"""`Sample`: repeated measurements, with their median and noise."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """Repeated measurements of one quantity."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, *values: float) -> Sample:
        return cls(values)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def noise(self) -> float:
        """Half the interquartile range, relative to the median; 0 for a single value."""
        if len(self.values) < 2 or not self.median:
            return 0.0
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return (high - low) / 2 / abs(self.median)

    def percentile(self, percent: int) -> float:
        if len(self.values) < 2:
            return self.values[0]
        return statistics.quantiles(self.values, n=100, method="inclusive")[percent - 1]

    def each(self, change: Callable[[float], float]) -> Sample:
        """The same measurements in another unit."""
        return Sample(tuple(map(change, self.values)))

    def over(self, other: Sample) -> Sample:
        """The ratio of each pair: disturbances that affect both at the same time cancel out."""
        return Sample(tuple(a / b for a, b in zip(self.values, other.values, strict=True)))

    def less(self, other: Sample) -> Sample:
        """The difference of each pair."""
        return Sample(tuple(a - b for a, b in zip(self.values, other.values, strict=True)))


def alternate(rounds: int, *measures: Callable[[], float]) -> tuple[Sample, ...]:
    """Takes all measurements alternately, for so many rounds; every other round in reverse, so none is always first."""
    taken: list[list[float]] = [[] for _ in measures]
    for number in range(rounds):
        turns: Sequence[int] = range(len(measures))
        for turn in turns if number % 2 == 0 else reversed(turns):
            taken[turn].append(measures[turn]())
    return tuple(Sample(tuple(values)) for values in taken)


def times(action: Callable[[], object], count: int) -> Iterator[float]:
    """The seconds of each of several repetitions."""
    clock = time.perf_counter
    for _ in range(count):
        started = clock()
        action()
        yield clock() - started
