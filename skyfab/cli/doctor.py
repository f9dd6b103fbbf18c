"""`skyfab doctor`: examines hosts and the network between them, and says what to do."""

from __future__ import annotations

import sys
from typing import Annotated

from skyfab.cli.command import Hosts, InventoryFile, Json, Option, command
from skyfab.cli.report import print_json
from skyfab.errors import UsageError
from skyfab.ui.terminal import is_rich


@command
def doctor(
    hosts: Hosts = None,
    inventory: InventoryFile = None,
    measure: Annotated[
        bool, Option("measure CPUs, GPUs, memory and the network between all pairs, for about 15 seconds")
    ] = False,
    paste: Annotated[bool, Option("print a report to paste into an issue, without names and addresses")] = False,
    json_: Json = False,
) -> int:
    """Check hosts and the network between them, and suggest fixes.

    Checks all hosts in parallel, over one connection each: login, shell, sshd, clock, names, limits, disk, GPUs and who
    uses them; then whether the hosts reach each other, and how fast. docs/doctor.md explains each finding.

    Exits with 0 if there is nothing worse than advice, with 1 after a warning or failure, with 3 if a host is unusable.

        skyfab doctor
        skyfab doctor node1
        skyfab doctor --hosts=gpu --measure
    """
    from skyfab import __version__
    from skyfab.cli.host_selection import asking, selected
    from skyfab.inspect.doctor import report
    from skyfab.inspect.doctor.examine import examined

    if json_ and paste:
        raise UsageError("--json and --paste cannot be combined", hint="use one of them")
    known, chosen = selected(hosts, inventory, quiet=json_)
    show = not json_ and is_rich(sys.stdout, sys.stderr)
    with asking(chosen, known, show=show) as asker:
        found = examined(asker, measured=measure)
    if json_:
        print_json(found)
    elif paste:
        import getpass

        people = [getpass.getuser(), *(name for one in found for name in one.people)]
        print(report.pasted(found, chosen, known, people, __version__))
    else:
        is_file = known.source is not None and known.source.suffix == ".toml"
        for line in report.lines(found, len(chosen), str(known.source) if is_file else "inventory.toml"):
            print(line)
    return report.exit_code(found)
