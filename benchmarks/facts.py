"""A one-line description of the machine that the benchmarks ran on."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sysconfig
from dataclasses import asdict, dataclass
from typing import Any, Final

from benchmarks.arena import Arena

OPTIMIZED: Final = "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")
"""This interpreter was built with profile-guided optimization, as most are; otherwise all of skyfab is slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts that the figures depend on."""

    cores: int
    arch: str
    kernel: str
    python: str
    optimized: bool
    ssh: str
    cipher: str
    lab: str
    load: float
    """The load average at the start."""

    @classmethod
    def of(cls, arena: Arena) -> Facts:
        version = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=True).stderr
        return cls(
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            arch=platform.machine(),
            kernel=platform.release(),
            python=platform.python_version(),
            optimized=OPTIMIZED,
            ssh=version.split(",")[0].split()[0],
            cipher=_cipher(arena),
            lab=arena.lab.kind,
            load=os.getloadavg()[0],
        )

    def __str__(self) -> str:
        build = "" if self.optimized else " (a build without optimizations)"
        return (
            f"{self.cores} cores, {self.arch}, kernel {self.kernel}, Python {self.python}{build}, "
            f"{self.ssh}, {self.cipher}; {self.lab} hosts; load {self.load:.1f} before"
        )

    def document(self) -> dict[str, Any]:
        return asdict(self)


def _cipher(arena: Arena) -> str:
    """The cipher that the ssh client and server negotiate."""
    with arena.ssh(arena.first, "true") as argv:
        said = subprocess.run(
            [argv[0], "-v", *argv[1:]], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
        ).stderr
    found = re.search(r"client->server cipher: (\S+)", said)
    return found[1] if found else "unknown cipher"
