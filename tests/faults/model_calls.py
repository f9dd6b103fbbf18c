"""What the calls of the model do on hosts. Standard library only: hosts import it as a part of the project."""

from __future__ import annotations

import hashlib
import os
import signal
import time

import skyfab as sky

SEEN: list[int] = []
"""The broadcasts that this process has run, in its order."""


@sky.function
def double(number: int) -> int:
    return 2 * number


@sky.function
def nap(number: int, seconds: float) -> int:
    time.sleep(seconds)
    return 2 * number


@sky.function
def save_and_return(number: int, seconds: float) -> int:
    """Returns early when it is asked to end, as a function that saves a checkpoint does."""
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    try:
        end = time.monotonic() + seconds
        while not asked and time.monotonic() < end:
            time.sleep(0.005)
        return 2 * number
    finally:
        signal.signal(signal.SIGTERM, before)


limited_nap = sky.function(timeout=0.2)(nap.fn)
limited_save = sky.function(timeout=0.2)(save_and_return.fn)


@sky.function
def fail(number: int) -> None:
    raise ArithmeticError(number)


@sky.function
def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@sky.function
def version() -> int:
    """What the project's own module says."""
    import edited_code

    return int(edited_code.version)


@sky.function
def join(number: int, content: bytes = b"", seconds: float = 0.0) -> tuple[int, int, str, int, int, list[int]]:
    """One rank's part of a broadcast: the number doubled, who ran it, and the last broadcasts of its process."""
    SEEN.append(number)
    time.sleep(seconds)
    info = sky.instance_info()
    first = max(0, len(SEEN) - 40)
    return 2 * number, info.rank, info.job_id, os.getpid(), first, SEEN[first:]
