"""The login itself, which has succeeded."""

from __future__ import annotations

from skyfab.inspect.doctor.host_report import Findings, HostReport


def check(report: HostReport) -> Findings:
    yield report.finding("login", "login", "ok", f"logged in as {report.facts.user}")
