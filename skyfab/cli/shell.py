"""`skyfab exec`: runs a shell command on every host."""

from __future__ import annotations

import sys

from skyfab.calls.call import as_function
from skyfab.cli import report
from skyfab.cli.fanout import fan_out, load
from skyfab.errors import UsageError


def shell(command: str, selection: str | None, inventory: str | None) -> int:
    """Runs `command` with /bin/sh in the home folder of every host; returns the exit code for all of them."""
    if not command.strip():
        raise UsageError("no command to run", hint="it comes after two dashes: skyfab exec --hosts=all -- uptime")

    def run(command: str) -> int:  # pickled by value: hosts do not have this module
        import subprocess
        from pathlib import Path

        return subprocess.run(["/bin/sh", "-c", command], cwd=Path.home(), stdin=subprocess.DEVNULL).returncode

    outcomes = fan_out(lambda pool: pool.run(as_function(run)(command)), selection, load(inventory), show=True)
    codes = {0}
    for outcome in outcomes:
        if outcome.error is not None:
            print(report.text(outcome.error), file=sys.stderr)
            codes.add(report.exit_code(outcome.error))
        elif outcome.result:
            ended = f"exit code {outcome.result}" if outcome.result > 0 else f"killed by signal {-outcome.result}"
            print(f"{outcome.host.name}: {ended}", file=sys.stderr)
            codes.add(1)
    return max(codes)
