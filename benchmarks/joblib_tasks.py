"""Benchmark: joblib's tasks on one host, against joblib's own processes with the same cores."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import skyfab as sky
from benchmarks.arena import Arena
from benchmarks.remote import count_up
from benchmarks.result import Bar, Result, Skip
from benchmarks.sample import alternate


class Joblib:
    name = "joblib"
    about = "1,000 tasks of a millisecond by joblib on one host, against loky with as many processes"

    def run(self, arena: Arena) -> Iterator[Result]:
        if importlib.util.find_spec("joblib") is None:
            raise Skip("joblib is not installed")
        jobs, tasks = max(2, os.cpu_count() or 1), arena.scale.tasks
        # In a program of its own, because loky leaves processes in the one that uses it.
        words = [sys.executable, "-m", "benchmarks.joblib_tasks", str(tasks), str(jobs)]
        options = {"cwd": Path(__file__).parents[1], "text": True}
        with (
            arena.pool(arena.first, slots=jobs, plugins=[sky.plugins.joblib()]),
            subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options) as program,  # type: ignore[call-overload]
        ):

            def loky() -> float:
                program.stdin.write("again\n")
                program.stdin.flush()
                return float(program.stdout.readline())

            def ours() -> float:
                return measured("skyfab", tasks, jobs)

            ours()
            loky()  # warm-up
            taken, baseline = alternate(arena.scale.maps, ours, loky)
        yield Result(
            row=self.name,
            what=f"{tasks:,} tasks, {jobs} jobs",
            unit="ms",
            ours=taken.each(lambda seconds: seconds * 1e3),
            baseline=baseline.each(lambda seconds: seconds * 1e3),
            against="loky",
            bar=Bar(1.5),
        )


def measured(backend: str, tasks: int, jobs: int) -> float:
    import joblib

    started = time.perf_counter()
    found = joblib.Parallel(n_jobs=jobs, backend=backend)(joblib.delayed(count_up)(20_000) for _ in range(tasks))
    taken = time.perf_counter() - started
    assert len(found) == tasks
    return taken


if __name__ == "__main__":
    for _ in sys.stdin:
        print(measured("loky", int(sys.argv[1]), int(sys.argv[2])), flush=True)
