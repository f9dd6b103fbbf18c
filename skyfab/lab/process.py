"""Local processes: start them, identify them by pid and start time, kill them, list them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

USUAL = (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGQUIT, signal.SIGTERM, signal.SIGXFSZ)
"""Signals that a host's processes must not inherit as ignored: Python ignores some, and nohup others."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of this machine, never confused with a later one that has the same pid."""

    pid: int
    started: str
    """Its start time, in a system-specific format: only compared for equality."""

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has this pid now. Raises ProcessLookupError if there is none."""
        return cls(pid, _stat(pid)[1])

    @classmethod
    def parse(cls, text: str) -> Process:
        """The inverse of `str`."""
        pid, started = text.split(maxsplit=1)
        return cls(int(pid), started.strip())

    def __str__(self) -> str:
        return f"{self.pid} {self.started}"

    @property
    def alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        try:
            state, started = _stat(self.pid)
        except ProcessLookupError:
            return False
        return started == self.started and state not in "ZX"

    def end(self, timeout: float = 10.0) -> None:
        """Kills it if it runs, and returns when it has exited. Raises TimeoutError if it does not exit."""
        deadline = time.monotonic() + timeout
        if self.alive and self.pid != os.getpid():
            os.kill(self.pid, signal.SIGKILL)
        while not self._collected():
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} does not end")
            time.sleep(0.002)

    def _collected(self) -> bool:
        """Whether it has exited; reaps it if it is our child."""
        if self.pid == os.getpid():
            return True
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        except ChildProcessError:
            return not self.alive


@dataclass(frozen=True, slots=True, kw_only=True)
class LabProcess:
    """A process that runs on a lab host."""

    pid: int
    """Its pid on the host."""
    ppid: int
    """Its parent's pid on the host; 0 if the parent does not belong to the host."""
    uid: int
    cmdline: tuple[str, ...]
    outside: int
    """Its pid on this machine, for `os.kill`."""

    def __str__(self) -> str:
        return f"{self.pid} {' '.join(self.cmdline)}"


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    log: Path | None = None,
    stdin: int | None = None,
    stdout: int | None = None,
) -> Process:
    """Starts a program that may outlive this one: in its own session, without our descriptors.

    Its output is appended to `log`, or discarded. `subprocess` is not used, because it needs an object that is kept.
    """
    output = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    ends = [nothing if stdin is None else stdin, output if stdout is None else stdout, output]
    try:
        pid = os.posix_spawnp(
            argv[0],
            list(argv),
            dict(env),
            file_actions=[(os.POSIX_SPAWN_DUP2, end, number) for number, end in enumerate(ends)],
            setsid=True,
            setsigmask=[],
            setsigdef=USUAL,
        )
    finally:
        os.close(output)
        os.close(nothing)
    return Process.of(pid)


def listed(wanted: Callable[[int], bool]) -> list[LabProcess]:
    """The running processes of this machine whose pids are wanted, sorted by their pids on the host."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    found = [process for pid in pids if wanted(pid) and (process := _look(pid))]
    inside = {process.outside: process.pid for process in found}
    parents = [replace(process, ppid=inside.get(process.ppid, 0)) for process in found]
    return sorted(parents, key=lambda process: process.pid)


def _look(pid: int) -> LabProcess | None:
    """A process as in /proc, with its parent's pid on this machine; None if it has exited."""
    try:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        cmdline = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
    except OSError:
        return None
    return LabProcess(
        pid=int(status["NSpid"].split()[-1]),
        ppid=int(status["PPid"]),
        uid=int(status["Uid"].split()[0]),
        cmdline=tuple(cmdline.split("\0")) if cmdline else (f"[{status['Name']}]",),
        outside=pid,
    )


def _stat(pid: int) -> tuple[str, str]:
    """The process's state (a letter) and start time. Raises ProcessLookupError if it does not exist."""
    if not Path("/proc/self/stat").exists():
        shown = subprocess.run(["ps", "-o", "state=,lstart=", "-p", str(pid)], capture_output=True, text=True).stdout
        if not shown.strip():
            raise ProcessLookupError(pid)
        return shown.strip()[0], " ".join(shown.split()[1:])
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(pid) from None
    fields = text.rpartition(")")[2].split()  # the name, in brackets, may contain anything
    return fields[0], f"{fields[19]}@{_boot()}"


@cache
def _boot() -> str:
    """Identifies the current boot of the machine: process start times are relative to it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
