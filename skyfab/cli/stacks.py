"""`skyfab stacks`: shows the Python stacks of all workers on the hosts, grouped."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from skyfab.cli import report
from skyfab.cli.command import Hosts, InventoryFile, command
from skyfab.ui.terminal import clean_lines

if TYPE_CHECKING:
    from skyfab.errors import SkyfabError


@command
def stacks(hosts: Hosts = None, inventory: InventoryFile = None) -> int:
    """Show where all ranks are right now, alike ones together.

    The Python stacks of every rank of yours on the hosts, whichever program started it, also when it is stuck in a
    collective: "3 ranks in all_reduce at …, 1 rank in load at …". Nothing is disturbed. Ends with 3 when a host cannot
    be asked.

        skyfab stacks
        skyfab stacks --hosts=node1,node2
    """
    from skyfab.inventory.inventory import Inventory
    from skyfab.pool.stacks import describe, groups, parse, script
    from skyfab.session.shell_pool import Shells

    found = Inventory.of(inventory)
    errors: list[SkyfabError] = []
    with Shells(found.select(hosts), found) as shells:
        answers = shells.ask(lambda shell: parse(shell.host.name, shell.run(script())), errors)
    alike = groups([stack for answer in answers for stack in answer])
    for group in alike:
        print(clean_lines(describe(group)))
    if not alike:
        print("no ranks are at work there", file=sys.stderr)
    for error in errors:
        print(report.text(error), file=sys.stderr)
    return 3 if errors else 0
