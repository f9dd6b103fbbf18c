"""Versions as tuples, so that they compare correctly, and names of processor architectures."""

from __future__ import annotations

import re


def numbers(version: str) -> tuple[int, ...]:
    """The numbers in a version.

    >>> numbers("550.54.14"), numbers("rocm6.4"), numbers("")
    ((550, 54, 14), (6, 4), ())
    """
    return tuple(map(int, re.findall(r"[0-9]{1,9}", version)))


def machine(name: str) -> str:
    """One name for each kind of processor: `uname -m` differs between systems.

    >>> machine("arm64"), machine("amd64"), machine("riscv64")
    ('aarch64', 'x86_64', 'riscv64')
    """
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(name, name)
