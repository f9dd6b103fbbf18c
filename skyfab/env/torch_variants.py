"""Which builds of torch run on a host with its NVIDIA driver."""

from __future__ import annotations

from typing import Final

from skyfab._util.versions import numbers

DRIVERS: Final = {13: (580,), 12: (525, 60, 13), 11: (450, 80, 2)}
"""CUDA's major version → the oldest driver that supports it (as in uv's own table)."""


def cuda_for(driver: str) -> int | None:
    """The newest major version of CUDA that an NVIDIA driver supports.

    >>> cuda_for("550.54.14"), cuda_for("390.1")
    (12, None)
    """
    version = numbers(driver)
    return next((cuda for cuda, oldest in DRIVERS.items() if version >= oldest), None)
