"""Measures the peak memory of processes, relative to what they used at the start."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_EVERY: Final = 0.02


class Peak:
    """Samples the memory of processes inside `with`; afterwards `above` is the peak in bytes, relative to the start.

    Shared memory counts once: it is the sum of their proportional set sizes (PSS).
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._start = 0
        self._most = 0

    def __enter__(self) -> Peak:
        self._start = self._most = self._now()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def above(self) -> int:
        return self._most - self._start

    def _watch(self) -> None:
        while not self._stop.wait(_EVERY):
            self._most = max(self._most, self._now())

    def _now(self) -> int:
        return sum(map(proportional, self._pids))


class OwnPeak:
    """The same for this process, with the kernel's high-water mark: no peak is missed between samples."""

    def __init__(self) -> None:
        self._start = 0
        self.above = 0

    def __enter__(self) -> OwnPeak:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        self._start = status("VmRSS")
        return self

    def __exit__(self, *exc: object) -> None:
        self.above = status("VmHWM") - self._start


def proportional(pid: int) -> int:
    try:
        return _kilobytes(Path(f"/proc/{pid}/smaps_rollup").read_text(), "Pss")
    except OSError:  # it has exited
        return 0


def status(name: str) -> int:
    return _kilobytes(Path("/proc/self/status").read_text(), name)


def _kilobytes(text: str, name: str) -> int:
    """The value of a line such as ``VmRSS:  123 kB``, in bytes; 0 if there is none, as for an exiting process."""
    found = re.search(rf"^{name}:\s*(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
