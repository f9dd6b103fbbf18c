"""Whether systemd ends the processes of users who log out."""

from __future__ import annotations

import shlex

from skyfab.inspect.doctor.finding import Findings, HostReport


def check(report: HostReport) -> Findings:
    if report.facts.kills and not report.facts.lingers:
        what = "systemd kills a user's processes at logout (KillUserProcesses): detached runs and reconnects fail"
        fix = f"on the host: sudo loginctl enable-linger {shlex.quote(report.facts.user)}"
        yield report.finding("system", "KillUserProcesses", "warning", what, fix)
