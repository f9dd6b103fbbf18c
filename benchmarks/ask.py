"""Benchmark: what it takes to ask hosts something at the command line, against `ssh host true`."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.arena import Arena
from benchmarks.result import Bar, Result
from benchmarks.sample import alternate

_ONE = Bar(2.6)
"""What `ssh host true` does not do: here Python is started, the inventory read and a table printed; there Python is
started too, and looks at the host.
"""
_COMMANDS = {"skyfab hosts": ["hosts"], "skyfab exec -- true": ["exec", "--", "true"]}


class Ask:
    name = "ask"
    about = "skyfab hosts and skyfab exec -- true on one host, against `ssh host true`; and on 64, against one"

    def run(self, arena: Arena) -> Iterator[Result]:
        count, crowd = max(arena.scale.hosts), arena.crowd()

        def ours(hosts: int, command: str, *rest: str) -> float:
            names = ",".join(host.name for host in crowd.hosts[:hosts])
            options = [f"--inventory={crowd.lab.inventory}", f"--hosts={names}"]
            return _seconds([Path(sys.executable).with_name("skyfab"), command, *options, *rest])

        ours(count, "hosts")  # warm-up: fills the hosts' caches before the measurement
        with crowd.ssh(crowd.first, "true") as argv:
            for what, words in _COMMANDS.items():
                on_one, on_all = partial(ours, 1, *words), partial(ours, count, *words)
                one, ssh = alternate(arena.scale.cold, on_one, lambda: _seconds(argv))
                all_, single = alternate(1, on_all, on_one)
                yield Result(
                    row=self.name,
                    what=f"{what}, one host",
                    unit="s",
                    ours=one,
                    baseline=ssh,
                    against="ssh host true",
                    bar=_ONE,
                )
                yield Result(
                    row=self.name,
                    what=f"{what}, {count} hosts",
                    unit="s",
                    ours=all_,
                    baseline=single,
                    against="one host",
                    bar=Bar(40),
                )


def _seconds(argv: Sequence[str | Path]) -> float:
    started = time.perf_counter()
    subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True)
    return time.perf_counter() - started
