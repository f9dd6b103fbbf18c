"""Has every worker of this cache write its Python stacks, even if it is stuck in C code.

Each worker has a signal on which faulthandler writes its stacks to a file in the pool's run folder. The pool itself is
not involved.
"""

from __future__ import annotations

import os
import socket
import time

TYPE_CHECKING = False  # importing `typing` would slow the start
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Final, TextIO

_SECONDS: Final = 1.5
"""Seconds that a worker has to write its stacks."""
_TICK: Final = 0.05
_MOST: Final = 256 * 1024
"""Bytes of the stacks of one worker."""


def stacks(cache: str) -> Iterator[dict[str, Any]]:
    """Yields process id, pool, rank and stacks of each worker; a worker of solo calls has no rank."""
    top = os.path.join(cache, "run", socket.gethostname())
    asked = []
    for folder in _names(top):
        for name in _names(os.path.join(top, folder, "stacks")):
            worker = _Worker.signalled(os.path.join(top, folder, "stacks", name), folder.rpartition("-")[0])
            if worker is not None:
                asked.append(worker)
    for worker in asked:
        yield worker.answer()


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


class _Worker:
    """A worker that was asked for its stacks."""

    def __init__(self, file: TextIO, about: dict[str, Any]) -> None:
        self._file = file
        self._about = about
        self._before = os.fstat(file.fileno()).st_size

    @classmethod
    def signalled(cls, path: str, pool: str) -> _Worker | None:
        try:
            file = open(path, errors="replace")  # noqa: SIM115  # closed by `answer`
        except OSError:
            return None
        try:
            pid, number, rank, worker = file.readline().split()
            if _has_open(int(pid), path):  # else another process got its number
                is_rank = worker.startswith("gang") and rank.isdigit()
                found = cls(file, {"pool": pool, "rank": int(rank) if is_rank else None, "pid": int(pid)})
                os.kill(int(pid), int(number))
                return found
        except (OSError, ValueError):
            pass
        file.close()
        return None

    def answer(self) -> dict[str, Any]:
        with self._file as file:
            _wait(file.fileno(), self._before)
            file.seek(self._before)
            return {**self._about, "text": file.read(_MOST)}


def _has_open(pid: int, path: str) -> bool:
    real = os.path.realpath(path)
    folder = f"/proc/{pid}/fd"
    for name in _names(folder):
        try:
            if os.readlink(f"{folder}/{name}") == real:
                return True
        except OSError:
            continue
    return False


def _wait(fd: int, before: int) -> None:
    """Until the file no longer grows."""
    deadline = time.monotonic() + _SECONDS
    last = before
    while time.monotonic() < deadline:
        time.sleep(_TICK)
        size = os.fstat(fd).st_size
        if size > before and size == last:
            return
        last = size
