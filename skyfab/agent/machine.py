"""The machine as its agent finds it: name, address, GPUs, and how processes end on it."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from importlib.util import find_spec


class Machine:
    """Facts about this machine, read once and cheaply."""

    def __init__(self) -> None:
        self.name = socket.gethostname()
        self.address = "127.0.0.1"
        self.cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.gpus = _gpus()
        self.platform = f"{sys.platform}-{os.uname().machine}"
        self.cloudpickle = _cloudpickle()
        self._kills = _out_of_memory_kills()

    def reached_through(self, connection: str) -> None:
        """Learns its own address from sshd's ``SSH_CONNECTION``: the one that is known to work."""
        words = connection.split()
        if len(words) == 4:
            self.address = words[2]

    def describe_end(self, exitcode: int) -> str:
        """In words, how a process with this exit code ended."""
        if exitcode >= 0:
            return f"its process ended with exit code {exitcode}"
        try:
            name = signal.Signals(-exitcode).name
        except ValueError:
            name = f"signal {-exitcode}"
        kills = _out_of_memory_kills()
        if -exitcode == signal.SIGKILL and kills > self._kills:
            self._kills = kills
            return "its process was killed because the host ran out of memory"
        return f"its process was killed by {name}"


def _cloudpickle() -> str:
    """The version of the one that ranks will import, without waiting for its import."""
    spec = find_spec("cloudpickle")
    if spec is None or spec.origin is None:
        return "none"
    with open(spec.origin) as source:
        found = re.search(r"__version__ = [\"'](.*?)[\"']", source.read())
    return found[1] if found else "unknown"


def _gpus() -> int:
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0


def _out_of_memory_kills() -> int:
    """The kernel's count, which any user may read."""
    try:
        with open("/proc/vmstat") as lines:
            return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    except OSError:
        return 0
