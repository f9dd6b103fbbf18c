"""The limits on open files and processes."""

from __future__ import annotations

import shlex

from skyfab.inspect.doctor.finding import Findings, HostReport


def check(report: HostReport) -> Findings:
    facts = report.facts
    for name, value, least, item in (
        ("open files", facts.files, 1024, "nofile"),
        ("processes", facts.processes, 512, "nproc"),
    ):
        if value and value < least:
            what = f"its limit on {name} is {value:,}"
            fix = f"in /etc/security/limits.conf: {shlex.quote(facts.user)} - {item} 65536, and log in again"
            yield report.finding("system", "limits", "warning", what, fix)
