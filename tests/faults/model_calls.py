"""What the calls of the model do on hosts. Standard library only: hosts import it as a part of the project."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import socket
import time
from pathlib import Path

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


@sky.function
def note(path: str, number: int) -> int:
    """Writes down that it has run."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(handle, f"{number}\n".encode())
    finally:
        os.close(handle)
    return 2 * number


retried = sky.function(retries=3)(double.fn)


@sky.function
def make(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


@sky.function
def array(seed: int, size: int) -> object:
    import numpy as np

    return np.random.default_rng(seed).integers(0, 1 << 40, size)


@sky.function
def digest_of(path: str) -> str:
    """Of a file."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@sky.function
def remove(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)


@sky.function
def parts(folder: str) -> list[str]:
    """Files that were never finished."""
    return [path.name for path in Path(folder).glob(".skyfab-*")]


@sky.function
def speak(number: int, lines: int, seconds: float, size: int) -> bytes:
    for line in range(lines):
        print(f"line {line} of {number}", flush=True)
        time.sleep(seconds / lines)
    return random.Random(number).randbytes(size)


@sky.function
def echo(path: str, seconds: float) -> int:
    """Serves one connection, and returns how much came; leaves its port in a file."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(seconds)
        Path(f"{path}.new").write_text(str(server.getsockname()[1]))
        Path(f"{path}.new").replace(path)
        try:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(seconds)
                count = 0
                while data := connection.recv(65536):
                    connection.sendall(data)
                    count += len(data)
        except OSError:  # the client is gone
            return -1
    return count


@sky.function
def total(tensor: object) -> int:
    return int(tensor.sum())  # type: ignore[attr-defined]
