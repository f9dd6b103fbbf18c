"""Benchmark: time until Dask is ready on four hosts."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Final

from benchmarks.arena import Arena
from benchmarks.pipe import Pipe
from benchmarks.result import Bar, Result, Skip
from benchmarks.sample import alternate

_HOSTS: Final = 4
_PORT: Final = 8786
"""Dask's own."""


class Dask:
    name = "dask"
    about = f"Dask ready on {_HOSTS} hosts, against `ssh HOST dask scheduler` and `ssh HOST dask worker`"

    def run(self, arena: Arena) -> Iterator[Result]:
        if find_spec("distributed") is None:
            raise Skip("distributed is not installed")
        hosts = len(arena.hosts[:_HOSTS])
        ours, by_hand = alternate(arena.scale.starts, lambda: _ours(arena), lambda: _by_hand(arena))
        yield Result(
            row=self.name,
            what=f"ready on {hosts} hosts of an open pool",
            unit="s",
            ours=ours,
            baseline=by_hand,
            against="plain ssh",
            bar=Bar(1.2),
        )


def _ours(arena: Arena) -> float:
    """Does not include opening the pool, as programs do that for all of their calls."""
    with arena.pool(*arena.hosts[:_HOSTS]) as compute:
        started = time.perf_counter()
        with compute.dask():
            return time.perf_counter() - started


def _by_hand(arena: Arena) -> float:
    """Starts everything at the same time: workers wait for the scheduler. Without TLS and without a tunnel."""
    from distributed import Client

    hosts = arena.hosts[:_HOSTS]
    address = f"tcp://{hosts[0].address}:{_PORT}"
    commands = [(hosts[0], ["scheduler", "--host", str(hosts[0].address), "--port", str(_PORT)])]
    commands += [(host, ["worker", address, "--host", str(host.address)]) for host in hosts]
    started = time.perf_counter()
    with ExitStack() as stack:
        for host, words in commands:
            program = shlex.join([host.python, "-m", "dask", *words])
            command = f"{program} 2>/dev/null & cat > /dev/null; kill $!; wait"  # it ends with its input
            stack.enter_context(Pipe(stack.enter_context(arena.ssh(host, command))))
        with Client(address, timeout=60) as client:
            client.wait_for_workers(len(hosts))
            return time.perf_counter() - started
