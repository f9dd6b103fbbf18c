"""`skyfab lab.up`, `lab.down` and `lab.status`: temporary hosts on this machine."""

from __future__ import annotations

import os
import sys
from typing import Annotated

from skyfab._util.hints import HINTS
from skyfab.cli import report
from skyfab.cli.command import Json, Option, command


@command
def lab_up(
    count: Annotated[int, Option("the number of hosts", "N")] = 4,
    python: Annotated[
        str | None,
        Option(
            "an interpreter of this machine for the hosts to use, with its packages",
            "PATH",
            default="the system's; this program's if the versions differ",
        ),
    ] = None,
) -> None:
    """Start temporary hosts on this machine.

    The hosts are named node1, node2 and so on; the last line of the output is the path of their inventory. As root on
    Debian, installs the programs that it needs (openssh-server, iproute2).

        export SKYFAB_INVENTORY=$(skyfab lab.up --count=2)
        skyfab hosts
    """
    from skyfab import lab

    path = lab.up(count, python=python)
    for host in lab.status():
        print(host, file=sys.stderr)
    if sys.stdout.isatty():  # else the path goes to a variable already
        print(f"hint: export SKYFAB_INVENTORY={path}", file=sys.stderr)
    print(path, flush=True)


@command
def lab_down() -> None:
    """Remove the temporary hosts.

    Removes their processes, networks and files.

        skyfab lab.down
    """
    from skyfab import lab

    print("the lab is down" if lab.down() else "no lab was up", file=sys.stderr)


@command
def lab_status(json_: Json = False) -> None:
    """List the temporary hosts.

    Prints name, address, kind and state, one line for each host.

        skyfab lab.status
        skyfab lab.status --json
    """
    from skyfab import lab
    from skyfab.lab.persistent import find

    found = lab.status()
    if json_:
        fields = ("name", "kind", "user", "address", "port", "up")
        report.print_json([{name: getattr(host, name) for name in fields} for host in found])
        return
    for host in found:
        print(host)
    if not found:
        print(HINTS.adapted("no lab is up\nhint: skyfab lab.up"), file=sys.stderr)
    elif found[0].up and (here := find()) is not None and os.environ.get("SKYFAB_INVENTORY") != str(here.inventory):
        print(f"hint: export SKYFAB_INVENTORY={here.inventory}", file=sys.stderr)
