"""Whether systemd ends the processes of users who log out."""

from __future__ import annotations

from collections.abc import Iterator

from skyfab.inspect.doctor.finding import Finding
from skyfab.inspect.doctor.host_report import HostReport


def check(report: HostReport) -> Iterator[Finding]:
    if report.facts.kills and not report.facts.lingers:
        what = "systemd ends all processes of a user who logs out (KillUserProcesses): detached runs, and reconnects"
        fix = f"on the host: sudo loginctl enable-linger {report.facts.user}"
        yield report.finding("system", "KillUserProcesses", "warning", what, fix)
