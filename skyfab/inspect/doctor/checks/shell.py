"""The login shell: what it prints when it runs a command, and how fast it starts."""

from __future__ import annotations

from typing import Final

from skyfab.inspect.doctor.finding import Findings, HostReport

_SLOW: Final = 3.0


def check(report: HostReport) -> Findings:
    facts = report.facts
    yield report.finding("login", "login", "ok", f"logged in as {facts.user}")
    if report.host.transport == "local" or report.host.inside:
        return
    if facts.shell_said:
        first = facts.shell_said.splitlines()[0][:60]
        what = f"its login shell {facts.shell} prints {first!r} when it runs a command: scp and rsync fail"
        fix = "print only in interactive shells, in ~/.bashrc: case $- in *i*) … ;; esac"
        yield report.finding("login", "shell", "warning", what, fix)
    elif facts.shell_seconds is None or facts.shell_seconds > _SLOW:
        what = f"its login shell takes more than {_SLOW:.0f} s to start: every connection waits for it"
        fix = "check what ~/.bashrc and similar files start, such as conda or nvm"
        yield report.finding("login", "shell", "advice", what, fix)
    else:
        yield report.finding("login", "shell", "ok", f"{facts.shell} starts silently")
