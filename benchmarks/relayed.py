"""Benchmark: content for several hosts: how often it leaves this machine, and the time it takes against one host."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.arena import Arena
from benchmarks.remote import swallow
from benchmarks.result import Bar, Result
from benchmarks.sample import Sample, alternate
from skyfab.inventory.host import Host

_MANY = 16
_THERE = "/tmp/skyfab-bench-relayed"


class Relayed:
    name = "relay"
    about = "256 MiB as argument of @ and as files: bytes that leave for 4 hosts; 16 hosts at 100 Mbit/s against one"

    def run(self, arena: Arena) -> Iterator[Result]:
        size = arena.scale.relayed << 20
        for what, send in (("", _seconds), (" of files", _put)):
            before = arena.left
            send(arena, arena.hosts, size)
            yield Result(
                row=self.name,
                what=f"{arena.scale.relayed} MiB{what} to {len(arena.hosts)} hosts, bytes that leave",
                unit="MB",
                ours=Sample.of((arena.left - before) / 1e6),
                baseline=Sample.of(size / 1e6),
                against="its size",
                bar=Bar(1.1),
            )
        crowd = arena.crowd()
        machines, many = crowd.lab.hosts[:_MANY], crowd.hosts[:_MANY]
        for machine in machines:
            machine.slow(100)
        try:
            ours, one = alternate(1, lambda: _seconds(crowd, many, size), lambda: _seconds(crowd, many[:1], size))
        finally:
            for machine in machines:
                machine.slow(None)
        what = f"{arena.scale.relayed} MiB to {len(many)} hosts at 100 Mbit/s"
        yield Result(row=self.name, what=what, unit="s", ours=ours, baseline=one, against="one host", bar=Bar(1.15))


def _seconds(arena: Arena, hosts: Sequence[Host], size: int) -> float:
    with arena.pool(*hosts) as compute:
        swallow(0) @ compute
        content = compute.put(os.urandom(size))
        began = time.perf_counter()
        swallow(content) @ compute
        return time.perf_counter() - began


def _put(arena: Arena, hosts: Sequence[Host], size: int) -> None:
    """A folder: most of it is large files, an eighth small ones."""
    with tempfile.TemporaryDirectory() as here, arena.pool(*hosts) as compute:
        for number in range(7):
            (Path(here) / f"large{number}").write_bytes(os.urandom(size // 8))
        for number in range(256):
            (Path(here) / f"small{number}").write_bytes(os.urandom(size // 8 // 256))
        try:
            compute.upload(here, to=_THERE)
        finally:
            for machine in arena.lab.hosts:
                machine.run(["rm", "-rf", _THERE])
