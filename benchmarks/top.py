"""Benchmark: what it costs to look at many hosts all the time, as `skyfab top` does."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.arena import Arena
from benchmarks.result import Bar, Result, Skip
from benchmarks.sample import Sample

_READY = 300.0
"""Seconds until all hosts have answered."""
_EVERY = 2
"""Seconds between two looks at a host, the default of `skyfab top`."""


class Top:
    name = "top"
    about = "the processor time of skyfab top while it looks at 64 hosts every 2 s"

    def run(self, arena: Arena) -> Iterator[Result]:
        count = max(arena.scale.hosts)
        own, ssh = _share(arena.crowd(), count)
        what = f"top, {count} hosts, of a core"
        yield Result(row=self.name, what=what, unit="%", ours=own, bar=Bar(10.0, on="value"))
        yield Result(row=self.name, what=f"{what}, its ssh", unit="%", ours=ssh)


def _share(crowd: Arena, count: int) -> tuple[Sample, Sample]:
    """The percentage of a core that `skyfab top` takes, and that its ssh programs take, in each of some periods."""
    own, ssh = [], []
    with _at_terminal(["top", f"--inventory={crowd.lab.inventory}", f"--every={_EVERY}"]) as (process, read):
        text, deadline = b"", time.monotonic() + _READY
        while f"{count} ready".encode() not in text:
            text += read(0.5)
            if process.poll() is not None or time.monotonic() > deadline:
                raise Skip(f"not all hosts have answered: {text[-200:]!r}")
        _read_for(read, 2 * _EVERY)
        for _ in range(crowd.scale.openings):
            before = time.perf_counter(), _spent(process.pid), sum(map(_spent, _children(process.pid)))
            _read_for(read, 3 * _EVERY)
            after = time.perf_counter(), _spent(process.pid), sum(map(_spent, _children(process.pid)))
            wall, mine, theirs = (late - early for late, early in zip(after, before, strict=True))
            own.append(100 * mine / wall)
            ssh.append(100 * theirs / wall)
    return Sample(tuple(own)), Sample(tuple(ssh))


@contextmanager
def _at_terminal(words: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[float], bytes]]]:
    """Runs the `skyfab` command at a terminal; what it shows can be read. It is ended with the key q."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 120, 0, 0))
    environ = {**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}

    def read(seconds: float) -> bytes:
        return os.read(ours, 65536) if select.select([ours], [], [], seconds)[0] else b""

    with subprocess.Popen(
        [sys.executable, "-m", "skyfab", *words], stdin=theirs, stdout=theirs, stderr=theirs, env=environ
    ) as process:
        try:
            yield process, read
        finally:
            os.write(ours, b"q")
            while process.poll() is None:
                read(0.1)
            os.close(ours)
            os.close(theirs)


def _read_for(read: Callable[[float], bytes], seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        read(left)


def _spent(pid: int) -> float:
    """Seconds of processor time that a process has taken; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]
