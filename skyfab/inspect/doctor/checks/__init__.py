"""The checks of a host: a module for each, and a line for it in `CHECKS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from skyfab.inspect.doctor.checks import (
    clock,
    disk,
    driver,
    gpu_memory,
    gpu_tool,
    gpus,
    limits,
    login,
    logind,
    names,
    python,
    shell,
    sshd,
)
from skyfab.inspect.doctor.finding import Finding
from skyfab.inspect.doctor.host_report import HostReport

CHECKS: Final[tuple[Callable[[HostReport], Iterator[Finding]], ...]] = (
    login.check,
    shell.check,
    sshd.check,
    clock.check,
    names.check,
    python.check,
    limits.check,
    logind.check,
    disk.check,
    gpu_tool.check,
    gpus.check,
    gpu_memory.check,
    driver.check,
)
"""In the order of the report."""


def findings(report: HostReport) -> list[Finding]:
    """All findings about one host."""
    return [finding for check in CHECKS for finding in check(report)]
