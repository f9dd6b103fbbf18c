"""What contestants run on hosts, and what they are asked for. Standard library alone; numpy where it is used."""

from __future__ import annotations

from typing import Any

HOSTS = 4
"""Of the warm jobs, and of the one large file."""
MANY = 16
RANKS = 2
"""Of a gang, each on its own host."""


def add_one(number: int) -> int:
    return number + 1


def square(number: int) -> int:
    return number * number


def hostname() -> str:
    import socket

    return socket.gethostname()


def reverse(array: Any) -> Any:
    """A function of an array that returns one of the same size."""
    return array[::-1].copy()


def array(mebibytes: int, seed: int) -> Any:
    """An array whose content differs with the seed: what was sent once is not sent again by those who keep it."""
    import numpy

    return numpy.arange(seed, seed + mebibytes * 1024 * 1024 // 8, dtype=numpy.int64)
