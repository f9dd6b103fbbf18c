"""Benchmark: throughput and memory of sending a large tensor to a host and back, against `ssh host cat`.

Also over a link of 1 Gbit/s; and how long a repeated argument takes, which is not sent again.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import skyfab as sky
from benchmarks.arena import Arena
from benchmarks.memory import OwnPeak, Peak
from benchmarks.pipe import Pipe
from benchmarks.remote import identity, make, swallow
from benchmarks.result import Bar, Result, Skip
from benchmarks.sample import Sample, alternate, times

_GIB = 1024**3
_MBIT = 1000


class Bulk:
    name = "bulk"
    about = "a large tensor out and back, against as much through `ssh host cat`; its memory; a repeated argument"

    def run(self, arena: Arena) -> Iterator[Result]:
        cargo = Cargo.load(arena.scale.size * 1024**2, arena.scale.arrays)
        with arena.pool(arena.first) as compute:
            identity(cargo.library.ones(8)) >> compute  # makes the host import the library
            yield from self._memory(arena, compute, cargo)
            ferry = Ferry(arena, compute, cargo)
            yield from self._transfers(arena, ferry, "", Bar(0.9, "at least"))
            yield self._repeat(compute, cargo)
            arena.first_machine.slow(_MBIT)
            try:
                yield from self._transfers(arena, ferry, " at 1 Gbit/s", Bar(0.95, "at least"))
            finally:
                arena.first_machine.slow(None)

    def _transfers(self, arena: Arena, ferry: Ferry, where: str, bar: Bar) -> Iterator[Result]:
        both = alternate(arena.scale.bulk, ferry.both, ferry.both_raw)
        # `cat` sends back what it has while more arrives; a function has all of it first. So over a link that carries
        # both directions at once, the ratio is 0.5 at best.
        yield self._rates(ferry.cargo, f"out and back{where}", 2, both, None if where else bar)
        out = alternate(arena.scale.one_way, ferry.out, ferry.out_raw)
        yield self._rates(ferry.cargo, f"out{where}", 1, out, bar)
        back = alternate(arena.scale.one_way, ferry.back, ferry.back_raw)
        yield self._rates(ferry.cargo, f"back{where}", 1, back, bar)

    def _repeat(self, compute: sky.Compute, cargo: Cargo) -> Result:
        """An argument that cannot change: the second call puts it into the host's store, later ones refer to it."""
        content = bytes(cargo.view)
        taken = list(times(lambda: swallow(content) >> compute, 5))
        return Result(
            row=self.name,
            what=f"{cargo.size // 1024**2} MiB of bytes, repeated",
            unit="s",
            ours=Sample.of(*taken[3:]),
            baseline=Sample.of(taken[0]),
            against="its first time",
            bar=Bar(0.03),
        )

    def _memory(self, arena: Arena, compute: sky.Compute, cargo: Cargo) -> Iterator[Result]:
        pids = [process.outside for process in arena.first_machine.processes() if _is_ours(process.cmdline)]
        cargo.refresh()
        with OwnPeak() as here, Peak(pids) as there:
            returned = identity(cargo.array) >> compute
        assert bool((returned == cargo.array).all())
        for side, peak in (("on this side", here.above), ("on the host", there.above)):
            yield Result(
                row=self.name,
                what=f"memory {side}",
                unit="GiB",
                ours=Sample.of(peak / _GIB),
                bar=Bar(1.2 * cargo.size / _GIB, on="value"),
            )

    def _rates(
        self, cargo: Cargo, what: str, times: int, seconds: tuple[Sample, ...], bar: Bar | None = None
    ) -> Result:
        ours, baseline = (taken.each(lambda each: times * cargo.size / each / 1e6) for taken in seconds)
        return Result(
            row=self.name,
            what=f"{cargo.size // 1024**2} MiB {what}",
            unit="MB/s",
            ours=ours,
            baseline=baseline,
            against="ssh cat",
            bar=bar,
        )


@dataclass(frozen=True, slots=True)
class Cargo:
    """The data that is sent: an array of torch or numpy."""

    library: ModuleType
    array: Any
    view: memoryview
    """Its bytes."""

    @classmethod
    def load(cls, size: int, libraries: Sequence[str]) -> Cargo:
        library = _library(libraries)
        array = library.arange(size // 8)
        return cls(library, array, memoryview(_numbers(array)).cast("B"))

    @property
    def size(self) -> int:
        return len(self.view)

    @contextmanager
    def landing(self) -> Iterator[memoryview]:
        """A buffer of the same size for a raw read: new memory, as for a result; huge pages for few page faults."""
        with mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
            if hasattr(mmap, "MADV_HUGEPAGE"):
                area.madvise(mmap.MADV_HUGEPAGE)
            with memoryview(area) as view:
                yield view

    def refresh(self) -> None:
        """Changes the content: a host that has the same content in its store would not be sent it again."""
        array = self.array
        array += 1  # in place


@dataclass(frozen=True, slots=True)
class Ferry:
    """The transfers to measure. Each method returns the seconds it took."""

    arena: Arena
    compute: sky.Compute
    cargo: Cargo

    def both(self) -> float:
        return self._timed(lambda: identity(self.cargo.array) >> self.compute)

    def out(self) -> float:
        return self._timed(lambda: swallow(self.cargo.array) >> self.compute)

    def back(self) -> float:
        call = make(self.cargo.size, self.cargo.library.__name__)
        swallow(0) >> self.compute
        return self._timed(lambda: call >> self.compute)

    def _timed(self, action: Callable[[], object]) -> float:
        self.cargo.refresh()
        started = time.perf_counter()
        kept = action()
        taken = time.perf_counter() - started
        del kept
        return taken

    def both_raw(self) -> float:
        with self.arena.ssh(self.arena.first, "exec cat") as argv, Pipe(argv) as pipe:
            pipe.echo(b"ready")
            with self.cargo.landing() as landing:
                return pipe.exchange(self.cargo.view, landing)

    def out_raw(self) -> float:
        with self.arena.ssh(self.arena.first, "echo ready; exec cat >/dev/null") as argv, Pipe(argv) as pipe:
            pipe.line()
            started = time.perf_counter()
            pipe.send(self.cargo.view)
            pipe.wait()
            return time.perf_counter() - started

    def back_raw(self) -> float:
        count = self.cargo.size // 1024**2
        command = f"echo ready; exec dd if=/dev/zero bs=1048576 count={count} 2>/dev/null"
        with self.arena.ssh(self.arena.first, command) as argv, Pipe(argv) as pipe:
            pipe.line()
            with self.cargo.landing() as landing:
                started = time.perf_counter()
                pipe.receive(landing)
                return time.perf_counter() - started


def _library(names: Sequence[str]) -> ModuleType:
    for name in names:
        try:
            return __import__(name)
        except ImportError:
            continue
    raise Skip(f"none of {', '.join(names)} is installed")


def _numbers(array: Any) -> Any:
    """A torch tensor as a numpy array on the same memory."""
    return array.numpy() if hasattr(array, "numpy") else array


def _is_ours(cmdline: tuple[str, ...]) -> bool:
    """A process of skyfab on the host: link, agent, zygote or worker."""
    return any("/bundles/" in word for word in cmdline)
