"""Benchmark: joblib's tasks on one host, against joblib's own processes with the same cores."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import skyfab as sky
from benchmarks.arena import Arena
from benchmarks.remote import count_up
from benchmarks.result import Bar, Result, Skip
from benchmarks.sample import alternate


class Joblib:
    name = "joblib"
    about = "1,000 tasks of a millisecond by joblib on one host, against loky with as many processes"

    def run(self, arena: Arena) -> Iterator[Result]:
        try:
            import joblib
            from joblib.externals import loky
        except ImportError:
            raise Skip("joblib is not installed") from None
        cores = os.cpu_count() or 1
        tasks = arena.scale.tasks
        with arena.pool(arena.first, slots=max(2, cores), plugins=[sky.plugins.joblib()]):

            def measured(backend: str) -> float:
                started = time.perf_counter()
                found = joblib.Parallel(n_jobs=max(2, cores), backend=backend)(
                    joblib.delayed(count_up)(20_000) for _ in range(tasks)
                )
                taken = time.perf_counter() - started
                assert len(found) == tasks
                return taken

            measured("skyfab")
            measured("loky")  # warm-up
            try:
                ours, baseline = alternate(arena.scale.maps, lambda: measured("skyfab"), lambda: measured("loky"))
            finally:
                loky.get_reusable_executor().shutdown(wait=True)
        yield Result(
            row=self.name,
            what=f"{tasks:,} tasks, {max(2, cores)} jobs",
            unit="ms",
            ours=ours.each(lambda seconds: seconds * 1e3),
            baseline=baseline.each(lambda seconds: seconds * 1e3),
            against="loky",
            bar=Bar(1.5),
        )
