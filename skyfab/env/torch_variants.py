"""Which builds of torch run on a host: with its NVIDIA driver, or without a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from skyfab._util.versions import numbers

DRIVERS: Final = {13: (580,), 12: (525, 60, 13), 11: (450, 80, 2)}
"""CUDA's major version → the oldest driver that supports it (as in uv's own table)."""


def is_for_gpus(packages: Iterable[str]) -> bool:
    """Whether the torch that brings these packages is a build for GPUs.

    >>> is_for_gpus(["numpy", "nvidia-cublas"]), is_for_gpus(["numpy"])
    (True, False)
    """
    return any(re.match(r"nvidia-|cuda-|triton$|pytorch-triton", package) for package in packages)


def cuda_for(driver: str) -> int | None:
    """The newest major version of CUDA that an NVIDIA driver supports.

    >>> cuda_for("550.54.14"), cuda_for("390.1")
    (12, None)
    """
    version = numbers(driver)
    return next((cuda for cuda, oldest in DRIVERS.items() if version >= oldest), None)
