"""The checks of a host: a module for each, and a line for it in `CHECKS`."""

from __future__ import annotations

from collections.abc import Callable
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
from skyfab.inspect.doctor.host_report import Findings, HostReport

CHECKS: Final[tuple[Callable[[HostReport], Findings], ...]] = (
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
