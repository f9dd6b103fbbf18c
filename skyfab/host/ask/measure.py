"""Measures how fast this host is, with torch where that is installed."""

from __future__ import annotations

import time

TYPE_CHECKING = False  # importing `typing` would slow the start
if TYPE_CHECKING:
    from typing import Final

_BLOCK: Final = 1 << 20


def measure(cache: str, *, seconds: float) -> dict[str, float]:
    """Matrix products and copies of memory, for `seconds` each: rates by what was measured."""
    return {**_product(seconds), "memory": _memory(seconds)}


def _product(seconds: float) -> dict[str, float]:
    """Operations per second of a matrix product, by who does it: only the same may be compared."""
    try:
        import site

        site.main()  # finds installed packages: the link runs without
        import torch
    except Exception:  # it may be there and broken
        return {"product, in Python": _plain_product(seconds)}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 4096 if device == "cuda" else 512
    matrix = torch.ones(size, size, device=device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    _ = matrix @ matrix
    wait()
    best, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        _ = matrix @ matrix
        wait()
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return {f"product, by torch on {device}": best}


def _plain_product(seconds: float) -> float:
    size = 48
    rows = [[float(one * other % 7) for one in range(size)] for other in range(size)]
    best, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        columns = list(zip(*rows, strict=True))
        [[sum(map(float.__mul__, row, column)) for column in columns] for row in rows]
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


def _memory(seconds: float) -> float:
    """Bytes per second that are copied, the best of several times."""
    source, target = bytearray(64 * _BLOCK), memoryview(bytearray(64 * _BLOCK))
    best, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        target[:] = source
        best = max(best, len(source) / (time.perf_counter() - began))
    return best
