"""Facts about a host that an environment depends on: system, interpreters, drivers, disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from skyfab._util.versions import machine, numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program on a host: an interpreter, or uv."""

    path: str
    version: str
    """As the program reports it: ``3.11.7``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The result of probing a host."""

    boot: str = ""
    """Identifies the current boot of the machine; empty if unknown."""
    system: str = ""
    """As reported by `uname -s`: Linux, Darwin."""
    arch: str = ""
    """As reported by `uname -m`: x86_64, aarch64, arm64."""
    libc: str = ""
    """``glibc 2.36``, ``musl 1.2.4``; empty if there is none or it is unknown."""
    pythons: tuple[Program, ...] = ()
    """The interpreters on its PATH and in the usual folders, each once."""
    uv: Program | None = None
    driver: str = ""
    """The version of the NVIDIA driver."""
    rocm: str = ""
    cache: str = ""
    """The cache folder's full path."""
    free: int = 0
    """Free bytes on the cache folder's disk."""
    noexec: bool = False
    """Whether programs cannot be executed from the cache folder; False if that is unknown."""
    reachable: tuple[str, ...] = ()
    """The queried indexes that responded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The platform that a lock is made for."""

    system: str
    arch: str
    libc: str
    python: str
    """major.minor"""
    driver: str = ""
    rocm: str = ""

    @classmethod
    def of(cls, facts: Facts, python: str) -> Target:
        return cls(
            system=facts.system,
            arch=facts.arch,
            libc=facts.libc,
            python=python,
            driver=facts.driver,
            rocm=facts.rocm,
        )

    @property
    def is_plain(self) -> bool:
        """Whether it has no GPU that torch could use."""
        return not (self.driver[:1].isdigit() or self.rocm)

    @property
    def machine(self) -> str:
        """The architecture under the name that it has everywhere: aarch64 for arm64."""
        return machine(self.arch)

    @property
    def c_library(self) -> tuple[str, tuple[int, ...]]:
        """Its name and version: ``("glibc", (2, 36))``."""
        name, _, version = self.libc.partition(" ")
        return name, numbers(version)[:2]


DRIVERS: Final = {13: (580,), 12: (525, 60, 13), 11: (450, 80, 2)}
"""CUDA's major version → the oldest driver that supports it (as in uv's own table)."""


def cuda_for(driver: str) -> int | None:
    """The newest major version of CUDA that an NVIDIA driver supports.

    >>> cuda_for("550.54.14"), cuda_for("390.1")
    (12, None)
    """
    version = numbers(driver)
    return next((cuda for cuda, oldest in DRIVERS.items() if version >= oldest), None)
