"""The login itself, which has succeeded."""

from __future__ import annotations

from collections.abc import Iterator

from skyfab.inspect.doctor.finding import Finding
from skyfab.inspect.doctor.host_report import HostReport


def check(report: HostReport) -> Iterator[Finding]:
    yield report.finding("login", "login", "ok", f"logged in as {report.facts.user}")
