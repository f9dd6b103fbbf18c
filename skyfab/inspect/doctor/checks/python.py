"""Whether the host's Python has the same minor version as this machine's."""

from __future__ import annotations

import platform

from skyfab.inspect.doctor.finding import Findings, HostReport


def check(report: HostReport) -> Findings:
    own, other = platform.python_version(), report.survey.python
    minor = ".".join(own.split(".")[:2])
    if minor == ".".join(other.split(".")[:2]):
        yield report.finding("system", "Python", "ok", f"Python {other}")
    else:
        what = f"it has Python {other}, this machine has {own}"
        fix = f'functions of notebooks and lambdas need the same one: Image(python="{minor}")'
        yield report.finding("system", "Python", "advice", what, fix)
