"""Facts: what a host is, as far as an environment depends on it. Data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of a host."""

    name: str
    memory: int
    """MiB; 0 where nobody says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program on a host: an interpreter, or uv."""

    path: str
    version: str
    """As it says itself: ``3.11.7``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a host said of itself when it was probed."""

    boot: str = ""
    """Changes when the machine starts again; empty where nobody says."""
    system: str = ""
    """As `uname -s` says: Linux, Darwin."""
    arch: str = ""
    """As `uname -m` says: x86_64, aarch64, arm64."""
    libc: str = ""
    """``glibc 2.36``, ``musl 1.2.4``; empty where there is none to name."""
    release: str = ""
    """The system's own name: ``Debian GNU/Linux 12 (bookworm)``."""
    shell: str = ""
    user: str = ""
    pythons: tuple[Program, ...] = ()
    """The interpreters on its PATH and in its usual places, each once."""
    uv: Program | None = None
    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    """The NVIDIA driver's version."""
    rocm: str = ""
    cache: str = ""
    """The cache folder's full path."""
    free: int = 0
    """Bytes that the cache folder's disk has left."""
    filesystem: str = ""
    """The kind of the cache folder's disk: ext4, nfs4."""
    noexec: bool = False
    """Programs cannot be run from the cache folder."""
    files: int = 0
    """Files that a process may open; 0 for any number."""
    processes: int = 0
    """Processes that the user may have; 0 for any number."""
    reachable: tuple[str, ...] = ()
    """Those of the indexes asked about that answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a lock is made for."""

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
