"""The checks of a host: a module for each, and a line for it in `CHECKS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from skyfab.inspect.doctor.checks import (
    clock,
    disk,
    driver,
    gpus,
    limits,
    logind,
    names,
    python,
    shell,
    sshd,
)
from skyfab.inspect.doctor.finding import Finding, Findings, HostReport

CHECKS: Final[tuple[Callable[[HostReport], Findings], ...]] = (
    shell.check,
    sshd.check,
    clock.check,
    names.check,
    python.check,
    limits.check,
    logind.check,
    disk.check,
    driver.check,
    gpus.check,
)
"""In the order of the report."""


def findings(report: HostReport) -> list[Finding]:
    """All findings about one host."""
    return [finding for check in CHECKS for finding in check(report)]
