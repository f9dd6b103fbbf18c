"""`skyfab exec`: runs a shell command on every host."""

from __future__ import annotations

import sys
from typing import Annotated

from skyfab.cli import report
from skyfab.cli.command import Hosts, InventoryFile, Option, Workdir, command
from skyfab.errors import UsageError


@command
def exec_(
    *words: Annotated[str, Option("what the shell there runs", "-- COMMAND")],
    hosts: Hosts = None,
    inventory: InventoryFile = None,
    workdir: Workdir = "auto",
) -> int:
    """Run a shell command on every host.

    It runs in the working folder there, by /bin/sh: where run and put of this folder have their files; on this machine
    in this folder. As with ssh, the words after the dashes are joined with spaces: quote what the shell there should
    see. Ends with 1 when it failed anywhere.

        skyfab exec -- uptime
        skyfab exec node1 node2 -- ls -l ckpt
        skyfab exec --workdir='~' -- du -sh .cache
        skyfab exec --hosts=gpu -- 'nvidia-smi -L | wc -l'
    """
    from skyfab.calls.call import as_function
    from skyfab.cli.host_selection import selected
    from skyfab.pool.each_host import fan_out

    line = " ".join(words)
    if not line.strip():
        raise UsageError("no command to run", hint="it comes after two dashes: skyfab exec -- uptime")

    def run(line: str) -> int:  # pickled by value: hosts do not have this module
        import subprocess

        return subprocess.run(["/bin/sh", "-c", line], stdin=subprocess.DEVNULL).returncode

    found, chosen = selected(hosts, inventory)
    outcomes = fan_out(lambda pool: pool.run(as_function(run)(line)), chosen, found, show=True, workdir=workdir)
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
