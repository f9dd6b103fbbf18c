"""Has every worker of this cache write its Python stacks, even if it is stuck in C code.

Each worker has a signal on which faulthandler writes its stacks to a file in the pool's run folder. The pool itself is
not involved.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time

from skyfab.host.ask.runs import listed

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
    with contextlib.ExitStack() as files:
        asked = []
        for folder in listed(top):
            for name in listed(os.path.join(top, folder, "stacks")):
                with contextlib.suppress(OSError, ValueError):  # it has ended
                    file = files.enter_context(open(os.path.join(top, folder, "stacks", name), errors="replace"))
                    before = os.fstat(file.fileno()).st_size
                    asked.append((file, before, {"pool": folder.rpartition("-")[0], **_signal(file)}))
        for file, before, about in asked:
            _wait(file.fileno(), before)
            file.seek(before)
            yield {**about, "text": file.read(_MOST)}


def _signal(file: TextIO) -> dict[str, int | None]:
    """Asks the worker that has this file for its stacks. Raises OSError or ValueError if there is none."""
    pid, number, rank, worker = file.readline().split()
    if not _has_open(int(pid), file.name):
        raise ProcessLookupError("another process got its number")
    os.kill(int(pid), int(number))
    is_rank = worker.startswith("gang") and rank.isdigit()
    return {"rank": int(rank) if is_rank else None, "pid": int(pid)}


def _has_open(pid: int, path: str) -> bool:
    real = os.path.realpath(path)
    for name in listed(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{name}") == real:
                return True
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
