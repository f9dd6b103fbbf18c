"""How fast the host resolves its own name, and the address of this machine."""

from __future__ import annotations

from typing import Final

from skyfab.inspect.doctor.finding import Findings, HostReport

_SLOW: Final = 1.0


def check(report: HostReport) -> Findings:
    facts = report.facts
    fix = "add its name and address to its /etc/hosts: 10.0.0.11 node1"
    if facts.name_seconds is None or facts.name_seconds > _SLOW:
        what = f"looking up its own name takes {_within(facts.name_seconds)}, and frameworks do it in each process"
        yield report.finding("system", "name", "warning", what, fix)
    elif facts.name_error:
        yield report.finding("system", "name", "advice", f"it cannot resolve its own name: {facts.name_error}", fix)
    else:
        yield report.finding("system", "name", "ok", "resolves its own name quickly")
    if facts.reverse_seconds is None or facts.reverse_seconds > _SLOW:
        what = f"looking up the name of this machine's address takes {_within(facts.reverse_seconds)}"
        fix = "set UseDNS no in its /etc/ssh/sshd_config, or a working name server in its /etc/resolv.conf"
        yield report.finding("system", "reverse name", "advice", what, fix)


def _within(seconds: float | None) -> str:
    return "more than 5 s" if seconds is None else f"{seconds:.1f} s"
