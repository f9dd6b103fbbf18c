"""Benchmark: how long an examination of many hosts takes, against one of a single host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.arena import Arena
from benchmarks.result import Bar, Result
from benchmarks.sample import alternate
from skyfab.inspect.doctor.examine import examined
from skyfab.session.ask import Asker

_BAR = Bar(2.0)
"""Each host is first asked by a program, which then becomes the agent: two programs where opening starts one. A single
host has no network to examine, so that it starts one too; and in a lab all hosts share the processors of one machine.
"""


class Doctor:
    name = "doctor"
    about = "skyfab doctor of many hosts, the network between them included, against one host, and against opening them"

    def run(self, arena: Arena) -> Iterator[Result]:
        crowd = arena.crowd()
        hosts = crowd.hosts[: arena.scale.examined]

        def seconds(count: int) -> float:
            started = time.perf_counter()
            with Asker(hosts[:count], crowd.inventory) as asker:
                examined(asker)
            return time.perf_counter() - started

        def opening() -> float:
            started = time.perf_counter()
            with crowd.pool(*hosts):
                pass
            return time.perf_counter() - started

        seconds(arena.scale.examined)  # warm-up: fills the hosts' caches before the measurement
        all_, one, opened = alternate(
            arena.scale.examinations, lambda: seconds(arena.scale.examined), lambda: seconds(1), opening
        )
        result = Result(
            row=self.name,
            what=f"{arena.scale.examined} hosts",
            unit="s",
            ours=all_,
            baseline=opened,
            against="opening and closing them",
            bar=_BAR,
        )
        yield result
        yield replace(result, baseline=one, against="one host", bar=None)
