"""Benchmark: throughput of lines that a function prints, until an event subscriber on this machine receives them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import skyfab as sky
from benchmarks.arena import Arena
from benchmarks.remote import speak
from benchmarks.result import Bar, Result
from benchmarks.sample import alternate
from skyfab.ui.events import Event, Output

_RATE = 50_000


class Lines:
    name = "output"
    about = "200,000 lines printed by a rank, as a subscriber gets them, against the same to /dev/null"

    def run(self, arena: Arena) -> Iterator[Result]:
        lines = arena.scale.lines
        with arena.pool(arena.first) as compute:
            speak(10, True) >> compute

            def loud() -> float:
                return _until_last(compute, lines)

            def quiet() -> float:
                started = time.perf_counter()
                speak(lines, True) >> compute
                return time.perf_counter() - started

            heard, silent = alternate(arena.scale.output, loud, quiet)
            loud_slow, quiet_slow = (_paced(compute, lines // 2, to_nowhere) for to_nowhere in (False, True))
            paced, free = alternate(arena.scale.output, loud_slow, quiet_slow)
        yield Result(
            row=self.name,
            what=f"{lines:,} lines received",
            unit="lines/s",
            ours=heard.each(lambda seconds: lines / seconds),
            bar=Bar(_RATE, "at least", on="value"),
        )
        yield Result(
            row=self.name,
            what="that call, as fast as it prints",
            unit="s",
            ours=heard,
            baseline=silent,
            against="to /dev/null",
        )
        yield Result(
            row=self.name,
            what=f"a function that prints {_RATE:,} lines/s",
            unit="s",
            ours=paced,
            baseline=free,
            against="to /dev/null",
            bar=Bar(1.1),
        )


def _until_last(compute: sky.Compute, lines: int) -> float:
    """Seconds until a subscriber has received the last line."""
    seen = 0
    last = 0.0

    def count(event: Event) -> None:
        nonlocal seen, last
        if isinstance(event, Output):
            seen += 1
            last = time.perf_counter()

    unsubscribe = compute.events.subscribe(count)
    try:
        started = time.perf_counter()
        speak(lines, False) >> compute
        while seen < lines and time.perf_counter() - started < 60:
            time.sleep(0.001)
    finally:
        unsubscribe()
    assert seen == lines, f"{seen} of {lines} lines arrived"
    return last - started


def _paced(compute: sky.Compute, lines: int, quiet: bool) -> Callable[[], float]:
    """Measures, on the host, the duration of a function that prints at the rate of the benchmark's limit."""

    def run() -> float:
        unsubscribe = compute.events.subscribe(lambda event: None)
        try:
            return speak(lines, quiet, _RATE) >> compute
        finally:
            unsubscribe()

    return run
