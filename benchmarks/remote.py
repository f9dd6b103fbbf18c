"""What runs on the hosts. They import this module, so it imports nothing that they lack."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import skyfab as sky


@sky.function
def nothing() -> None:
    """The smallest call."""


@sky.function
def doze(seconds: float) -> None:
    """A call that runs for so long."""
    time.sleep(seconds)


@sky.function
def square(number: int) -> int:
    return number * number


@sky.function
def identity(value: Any) -> Any:
    return value


@sky.function
def swallow(value: Any) -> None:
    """Takes it and sends nothing back."""


@sky.function
def make(size: int, library: str) -> Any:
    """Sends so many bytes that were not sent here. They are kept: making them is not what is measured."""
    global _made
    if _made is None or _made.nbytes != size:
        module = __import__(library)
        _made = module.ones(size // 8, dtype=module.int64)
    return _made


_made: Any = None


@sky.function
def speak(lines: int, quiet: bool, rate: int = 0) -> float:
    """Prints lines of 100 bytes, at most `rate` a second, and returns the seconds that took.

    With `quiet` they go to /dev/null, by the same way up to the file descriptor.
    """
    line = "." * 99 + "\n"
    kept = os.dup(1)
    if quiet:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
    try:
        started = time.perf_counter()
        for number in range(lines):
            if rate and number % 500 == 0:
                time.sleep(max(0.0, started + number / rate - time.perf_counter()))
            sys.stdout.write(line)
        sys.stdout.flush()
        return time.perf_counter() - started
    finally:
        os.dup2(kept, 1)
        os.close(kept)
