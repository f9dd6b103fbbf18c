"""`skyfab gc`: cleans the caches of hosts and of this machine."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from skyfab.cli.command import Hosts, InventoryFile, Option, command

if TYPE_CHECKING:
    from skyfab.inventory.host import Host
    from skyfab.inventory.inventory import Inventory


@command
def gc(
    hosts: Hosts = None,
    inventory: InventoryFile = None,
    days: Annotated[int, Option("remove what has not been used for so many days", "N", least=0)] = 30,
    here: Annotated[bool, Option("clean what this machine keeps for hosts; without --hosts, nothing else")] = False,
) -> None:
    """Remove from the hosts' caches what has not been used for a while.

    Environments, packages, interpreters, project files, logs, and what was left half-made; and the working folders of
    projects, with what functions have written there: names and sizes are printed. What a pool is using stays, and so
    does what was used in the last hour: with --days=0 all the rest goes. With --here, the wheels, locks and tools that
    this machine keeps; where a lock goes, the next pool looks for the newest versions.

        skyfab gc
        skyfab gc --hosts=gpu --days=7
        skyfab gc --here
    """
    from skyfab.env.gc import sweep_here
    from skyfab.inventory.inventory import Inventory

    if here:
        print(f"here: {sweep_here(days)}", flush=True)
    if hosts is not None or not here:
        found = Inventory.of(inventory)
        clean(found.select(hosts), found, days)


def clean(hosts: Sequence[Host], inventory: Inventory, days: int) -> None:
    """Cleans the hosts' caches, and prints what was removed, a line for each host when it is done.

    Raises a HostError or PoolError for the hosts that could not be cleaned, after all others have been.
    """
    from skyfab.env.gc import sweep
    from skyfab.session.bootstrap import open_shell
    from skyfab.session.fanout import Raised, for_each_host, one_error
    from skyfab.session.transport import transport_for

    over = threading.Event()

    def one(host: Host) -> None:
        with open_shell(host, transport_for(host, inventory), stopped=over.is_set) as shell:
            swept = sweep(shell, days)
        sys.stdout.write(f"{host.name}: {swept}\n")  # a single write, since several threads may do so at the same time
        sys.stdout.flush()

    try:
        outcomes = for_each_host(one, hosts)
    finally:
        over.set()
    if failures := [outcome.error for outcome in outcomes if isinstance(outcome, Raised)]:
        raise one_error(failures, len(hosts))
