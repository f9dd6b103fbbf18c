"""`skyfab stacks`: shows the Python stacks of all workers on the hosts, grouped."""

from __future__ import annotations

import sys

from skyfab.cli import report
from skyfab.cli.command import Hosts, InventoryFile, Json, command
from skyfab.ui.terminal import clean_lines


@command
def stacks(hosts: Hosts = None, inventory: InventoryFile = None, json_: Json = False) -> int:
    """Show what all ranks are doing, with identical stacks grouped.

    Shows the Python stack of each of your ranks on the hosts, whichever program started it, even if it hangs in a
    collective: "3 ranks in all_reduce at …, 1 rank in load at …". Does not disturb the ranks. Exits with 3 if a host
    does not respond.

        skyfab stacks
        skyfab stacks node1 node2
        skyfab stacks --hosts=gpu --json
    """
    from skyfab.cli.host_selection import selected
    from skyfab.inspect.stacks import STACKS, describe, groups
    from skyfab.session.ask import Asker

    found, chosen = selected(hosts, inventory, quiet=json_)
    with Asker(chosen, found) as asker:
        outcomes = asker.ask(STACKS)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    alike = groups([stack for outcome in outcomes for stack in outcome.answer or ()])
    if json_:
        report.print_json([stack for group in alike for stack in group])
    for group in alike if not json_ else ():
        print(clean_lines(describe(group)))
    if not alike and not json_:
        print("no ranks are running", file=sys.stderr)
    return report.print_errors(errors)
