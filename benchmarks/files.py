"""Benchmark: folders of many small files and one large file to a host and back, against tar and cat through ssh."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import skyfab as sky
from benchmarks.arena import Arena
from benchmarks.result import Bar, Result
from benchmarks.sample import Sample, alternate

_MIB = 1024**2
_THERE = "/tmp/skyfab-bench-files"
_FOLDERS = 100
_WIRE = 1000.0
"""Mbit/s of a common network, on which not the processors are the limit."""
_BAR = Bar(0.9, "at least")
_FREE = Bar(0.7, "at least")
"""Without such a limit. Each byte passes one pipe more than with `cat`, between the agent and the worker that reads or
writes the file; all of them, ssh and this program share the processors.
"""


class Files:
    name = "files"
    about = "many small files and a large one out and back, against `tar | ssh tar` and `ssh cat`; and a second time"

    def run(self, arena: Arena) -> Iterator[Result]:
        scale = arena.scale
        with tempfile.TemporaryDirectory() as here, arena.pool(arena.first, image=sky.Image(excludes=["*"])) as compute:
            ferry = Ferry(arena, compute, Path(here))
            ferry.make(scale.files, scale.file)
            for what, ours, baseline in (
                ("out", ferry.small_out, ferry.tar_out),
                ("back", ferry.small_back, ferry.tar_back),
            ):
                seconds = alternate(scale.trips, ours, baseline)
                yield self._result(f"{scale.files} files {what}", "s", seconds, "tar", Bar(1.0))
            for what, again in (("out", ferry.again_out), ("back", ferry.again_back)):
                taken = alternate(scale.trips, again)[0]
                row = f"{scale.files} files {what}, a second time"
                yield Result(row=self.name, what=row, unit="s", ours=taken, bar=Bar(0.5, on="value"))
            yield from self._large(ferry, scale.trips)
            if arena.lab.kind == "namespace":
                arena.first_machine.slow(_WIRE)
                try:
                    yield from self._large(ferry, 1, f" at {_WIRE / 1000:g} Gbit/s")
                finally:
                    arena.first_machine.slow(None)
            arena.first_machine.run(["rm", "-rf", _THERE])

    def _large(self, ferry: Ferry, trips: int, link: str = "") -> Iterator[Result]:
        scale = ferry.arena.scale
        for what, ours, baseline, bar in (
            ("out", ferry.large_out, ferry.cat_out, _BAR if link else _FREE),
            ("back", ferry.large_back, ferry.cat_back, _BAR if link else _FREE),
        ):
            seconds = alternate(trips, ours, baseline)
            rates = tuple(taken.each(lambda each: scale.file * _MIB / each / 1e6) for taken in seconds)
            row = f"{scale.file} MiB {what}{link}"
            yield self._result(row, "MB/s", rates, "ssh cat", bar)

    def _result(self, what: str, unit: str, taken: Sequence[Sample], against: str, bar: Bar) -> Result:
        return Result(row=self.name, what=what, unit=unit, ours=taken[0], baseline=taken[1], against=against, bar=bar)


@dataclass(frozen=True, slots=True)
class Ferry:
    """The transfers to measure. Each method returns the seconds it took."""

    arena: Arena
    compute: sky.Compute
    here: Path

    def make(self, files: int, size: int) -> None:
        """Makes what is sent, and puts it on the host too."""
        for number in range(files):
            folder = self.here / "small" / str(number % _FOLDERS)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}.txt").write_bytes(os.urandom(1000 + number % 4000))
        with (self.here / "large").open("wb") as file:
            for _ in range(size):
                file.write(os.urandom(_MIB))
        for name in ("small", "large"):
            self.compute.upload(self.here / name, to=f"{_THERE}/{name}")
            self.compute.download(f"{_THERE}/{name}", to=self.here / "kept")

    # ---- ours

    def small_out(self) -> float:
        self._clear()
        return _timed(lambda: self.compute.upload(self.here / "small", to=f"{_THERE}/new"))

    def small_back(self) -> float:
        self._clear()
        return _timed(lambda: self.compute.download(f"{_THERE}/small", to=self.here / "new"))

    def again_out(self) -> float:
        return _timed(lambda: self.compute.upload(self.here / "small", to=f"{_THERE}/small"))

    def again_back(self) -> float:
        return _timed(lambda: self.compute.download(f"{_THERE}/small", to=self.here / "kept"))

    def large_out(self) -> float:
        self._clear()
        return _timed(lambda: self.compute.upload(self.here / "large", to=f"{_THERE}/new/"))

    def large_back(self) -> float:
        self._clear()
        return _timed(lambda: self.compute.download(f"{_THERE}/large", to=self.here / "new"))

    # ---- the baselines: the connection is there before the clock starts, as that of the pool is

    def tar_out(self) -> float:
        return self._through_ssh(["tar", "cf", "-", "-C", self.here / "small", "."], f"tar xf - -C {_THERE}/new")

    def tar_back(self) -> float:
        return self._from_ssh(f"tar cf - -C {_THERE}/small .", ["tar", "xf", "-", "-C", self.here / "new"])

    def cat_out(self) -> float:
        return self._through_ssh(["cat", self.here / "large"], f"cat >{_THERE}/new/large")

    def cat_back(self) -> float:
        return self._from_ssh(f"cat {_THERE}/large", ["sh", "-c", f"cat >{self.here}/new/large"])

    def _through_ssh(self, local: Sequence[str | Path], remote: str) -> float:
        self._clear()
        with self._ssh(f"echo ready; {remote}") as ssh:
            started = time.perf_counter()
            subprocess.run(local, stdout=ssh.stdin, check=True)
            assert ssh.stdin is not None
            ssh.stdin.close()
            ssh.wait()
            return time.perf_counter() - started

    def _from_ssh(self, remote: str, local: Sequence[str | Path]) -> float:
        self._clear()
        with self._ssh(f"echo ready; read go; {remote}") as ssh:
            assert ssh.stdin is not None
            started = time.perf_counter()
            ssh.stdin.write(b"go\n")
            ssh.stdin.flush()
            subprocess.run(local, stdin=ssh.stdout, check=True)
            ssh.wait()
            return time.perf_counter() - started

    def _ssh(self, command: str) -> subprocess.Popen[bytes]:
        with self.arena.ssh(self.arena.first, command) as argv:
            ssh = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
            assert ssh.stdout is not None
            while ssh.stdout.read(1) != b"\n":
                pass
            return ssh

    def _clear(self) -> None:
        """Removes what the last measurement has left, and makes empty folders."""
        self.arena.first_machine.run(["rm", "-rf", f"{_THERE}/new"])
        self.arena.first_machine.run(["mkdir", "-p", f"{_THERE}/new"])
        shutil.rmtree(self.here / "new", ignore_errors=True)
        (self.here / "new").mkdir()


def _timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started
