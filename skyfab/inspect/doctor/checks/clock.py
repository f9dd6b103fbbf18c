"""The clock: make, caches and the order of logs depend on it."""

from __future__ import annotations

from typing import Final

from skyfab.inspect.doctor.finding import Findings, HostReport

_WRONG: Final = 1.0
"""Seconds that a clock may be wrong."""


def check(report: HostReport) -> Findings:
    offset, unsure = report.offset
    if abs(offset) - unsure > _WRONG:
        way = "ahead of" if offset > 0 else "behind"
        what = f"its clock is {abs(offset):,.1f} s {way} this machine's"
        fix = "sudo timedatectl set-ntp true, on the host or this machine: timedatectl says which is wrong"
        yield report.finding("system", "clock", "warning", what, fix)
    else:
        yield report.finding("system", "clock", "ok", f"within {max(unsure, 0.1):.1f} s of this machine's")
