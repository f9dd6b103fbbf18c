"""The limits of the SSH server on logins and sessions."""

from __future__ import annotations

from typing import Final

from skyfab.inspect.doctor.finding import Findings, HostReport

_STARTUPS: Final = 10


def check(report: HostReport) -> Findings:
    facts = report.facts
    if report.host.transport == "local" or report.host.inside:
        return
    if facts.startups is not None and facts.startups < _STARTUPS:
        what = f"its sshd drops logins while {facts.startups} others have not finished (MaxStartups)"
        fix = "in /etc/ssh/sshd_config: MaxStartups 10:30:100"
        yield report.finding("login", "MaxStartups", "advice", what, fix)
    if facts.sessions is not None and facts.sessions < 2:
        what = f"its sshd allows {facts.sessions} session for each connection (MaxSessions)"
        yield report.finding("login", "MaxSessions", "warning", what, "in /etc/ssh/sshd_config: MaxSessions 10")
