"""How fast the host finds its own name, and the name of this machine."""

from __future__ import annotations

from typing import Final

from skyfab.inspect.doctor.host_report import Findings, HostReport

_SLOW: Final = 1.0


def check(report: HostReport) -> Findings:
    facts = report.facts
    fix = "add its name and address to its /etc/hosts: 10.0.0.11 node1"
    if facts.name_seconds is None or facts.name_seconds > _SLOW:
        what = f"it looks up its own name in {_within(facts.name_seconds)}: frameworks do that for each process"
        yield report.finding("system", "name", "warning", what, fix)
    elif facts.name_error:
        yield report.finding("system", "name", "advice", f"it does not find its own name: {facts.name_error}", fix)
    else:
        yield report.finding("system", "name", "ok", "finds its own name at once")
    if facts.reverse_seconds is None or facts.reverse_seconds > _SLOW:
        what = f"it looks up the name of this machine's address in {_within(facts.reverse_seconds)}"
        fix = "UseDNS no in its /etc/ssh/sshd_config, or a name server that answers in its /etc/resolv.conf"
        yield report.finding("system", "reverse name", "advice", what, fix)


def _within(seconds: float | None) -> str:
    return "more than 5 s" if seconds is None else f"{seconds:.1f} s"
