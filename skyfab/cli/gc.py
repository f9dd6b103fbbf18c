"""`skyfab gc`: cleans the caches of hosts and of this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final

from skyfab.cli.fanout import load
from skyfab.env.gc import Swept, sweep, sweep_here
from skyfab.errors import PoolError, SkyfabError
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.session.bootstrap import open_shell
from skyfab.session.transport import transport_for

_CLOSE_TIMEOUT: Final = 3.0
"""Timeout in seconds for disconnecting after Ctrl-C."""


def gc(selection: str | None, inventory: str | None, *, days: int, here: bool) -> None:
    """Prints what was removed, a line for each host. With `here` and no `selection`, cleans only this machine.

    Raises a HostError or PoolError for the hosts that could not be cleaned, after all others have been.
    """
    if here:
        print(f"here: {sweep_here(days)}", flush=True)
    if selection is not None or not here:
        found = load(inventory)
        _clean(found.select(selection), found, days)


def _clean(hosts: Sequence[Host], inventory: Inventory, days: int) -> None:
    results: dict[int, Swept | BaseException] = {}
    over = threading.Event()

    def clean(index: int, host: Host) -> None:
        try:
            with open_shell(host, transport_for(host, inventory), stopped=over.is_set) as shell:
                results[index] = sweep(shell, days)
        except BaseException as error:  # for the caller's thread to report
            results[index] = error

    threads = [threading.Thread(target=clean, args=pair, daemon=True) for pair in enumerate(hosts)]
    try:
        for thread in threads:
            thread.start()
        failures = []
        for index, thread in enumerate(threads):
            thread.join()
            result = results[index]
            if isinstance(result, Swept):
                print(f"{hosts[index].name}: {result}", flush=True)
            elif isinstance(result, SkyfabError):
                failures.append(result)
            else:
                raise result
    except BaseException:  # Ctrl-C
        over.set()
        deadline = time.monotonic() + _CLOSE_TIMEOUT
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        raise
    if failures:
        raise (
            failures[0] if len(failures) == 1 else PoolError(f"{len(failures)} of {len(hosts)} hosts failed", failures)
        )
