"""`skyfab top`: hosts and the runs on them, live."""

from __future__ import annotations

import sys
from typing import Annotated

from skyfab.cli.command import Hosts, InventoryFile, Option, command
from skyfab.cli.sigterm import SIGTERM
from skyfab.errors import UsageError
from skyfab.ui.terminal import is_rich


@command
def top(
    hosts: Hosts = None,
    inventory: InventoryFile = None,
    every: Annotated[int, Option("the time between two updates", "SECONDS")] = 2,
) -> int:
    """Show hosts and their runs, live.

    Shows what skyfab hosts and skyfab runs show, and keeps one connection to each host open. Keys: arrows select, l
    follows the log of a run, s shows the stacks of its ranks, x stops it, ? lists all keys, q quits.

        skyfab top
        skyfab top --hosts=gpu --every=5
    """
    from skyfab.cli.host_selection import selected
    from skyfab.inspect.top.live import Live

    if not is_rich(sys.stdin, sys.stdout):
        raise UsageError("skyfab top needs a terminal", hint="skyfab hosts and skyfab runs print the same once")
    known, chosen = selected(hosts, inventory, quiet=True)
    try:
        Live(chosen, known, every).run()
    except KeyboardInterrupt:
        return 130 if SIGTERM.came else 0
    return 0
