"""The functions that benchmarks run on hosts. Hosts import this module, so it imports nothing that they lack."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import skyfab as sky


@sky.function
def nothing() -> None:
    """The smallest call."""


@sky.function
def doze(seconds: float) -> None:
    """A call that runs for so many seconds."""
    time.sleep(seconds)


@sky.function
def start_process(script: str) -> None:
    """Runs a script in a new process, with this interpreter."""
    subprocess.run([sys.executable, script], check=True)


@sky.function
def square(number: int) -> int:
    return number * number


def count_up(last: int) -> int:
    """A task of joblib, which takes plain functions: about a millisecond of work."""
    return sum(number % 7 for number in range(last))


@sky.function
def identity(value: Any) -> Any:
    return value


@sky.function
def swallow(value: Any) -> None:
    """Receives a value and returns nothing."""


@sky.function
def make(size: int, library: str) -> Any:
    """Returns `size` bytes that were not sent to the host. Cached, since creating them is not to be measured."""
    global _made
    if _made is None or _made.nbytes != size:
        module = __import__(library)
        _made = module.ones(size // 8, dtype=module.int64)
    return _made


_made: Any = None


@sky.function
def count(until: int) -> Iterator[int]:
    yield from range(until)


@sky.function
def pieces(size: int, each: int, library: str) -> Iterator[Any]:
    """As much as `make` returns, in pieces."""
    whole = make.fn(size, library)
    for start in range(0, size // 8, each // 8):
        yield whole[start : start + each // 8] if library == "numpy" else whole[start : start + each // 8].clone()


class Counter:
    """An actor."""

    def __init__(self) -> None:
        self.value = 0

    def add(self) -> int:
        self.value += 1
        return self.value


@sky.function
def speak(lines: int, quiet: bool, rate: int = 0) -> float:
    """Prints lines of 100 bytes, at most `rate` per second, and returns the seconds that it took.

    With `quiet` the file descriptor of stdout is /dev/null; all else is the same.
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


@sky.function
def compiled_step(width: int) -> float:
    """The seconds of the first training step of a model under torch.compile."""
    import torch

    layers = [torch.nn.Linear(width, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 8)]
    model = torch.compile(torch.nn.Sequential(*layers))
    started = time.perf_counter()
    model(torch.ones(16, width)).sum().backward()
    return time.perf_counter() - started


@sky.function
def compiled_files() -> int:
    """How many files Inductor's cache has, apart from its locks."""
    found = os.walk(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    return sum(len(files) for folder, _, files in found if not folder.endswith("/locks"))
