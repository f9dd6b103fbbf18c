"""`skyfab gc`: cleans the caches of hosts and of this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

from skyfab.cli.command import Hosts, InventoryFile, Json, Option, command

if TYPE_CHECKING:
    from skyfab.env.gc import Swept
    from skyfab.inventory.host import Host
    from skyfab.inventory.inventory import Inventory


@command
def gc(
    hosts: Hosts = None,
    inventory: InventoryFile = None,
    days: Annotated[int, Option("remove what has not been used for N days", "N", least=0)] = 30,
    here: Annotated[bool, Option("clean the cache of this machine; without --hosts, only that")] = False,
    dry_run: Annotated[bool, Option("show what would be removed, and remove nothing")] = False,
    json_: Json = False,
) -> None:
    """Remove unused files from the caches of hosts.

    Removes environments, packages, interpreters, project files, logs, incomplete files, and the working directories of
    projects with what functions have written to them; prints names and sizes. Keeps what a pool is using, and what was
    used in the last hour; --days=0 removes everything else. --here removes wheels, locks and tools from the cache of
    this machine; without a lock, the next pool resolves to the newest versions.

        skyfab gc
        skyfab gc --days=0 --dry-run
        skyfab gc node1
        skyfab gc --hosts=gpu --days=7
        skyfab gc --here
    """
    import json

    from skyfab.cli.host_selection import selected
    from skyfab.env.gc import sweep_here

    found: list[dict[str, object]] = []
    if here:
        swept = sweep_here(days, dry_run=dry_run)
        found.append(_facts("here", swept))
        if not json_:
            print(f"here: {swept}", flush=True)
    try:
        if hosts is not None or not here:
            known, chosen = selected(hosts, inventory, quiet=json_)
            cleaned = (lambda *one: found.append(_facts(*one))) if json_ else _print
            clean(chosen, known, days, cleaned, dry_run=dry_run)
    finally:
        if json_:
            print(json.dumps(sorted(found, key=lambda facts: str(facts["host"])), indent=2, ensure_ascii=False))


def _print(host: str, swept: Swept) -> None:
    sys.stdout.write(f"{host}: {swept}\n")  # a single write, since several threads may do so at the same time
    sys.stdout.flush()


def _facts(host: str, swept: Swept) -> dict[str, object]:
    folders = [{"name": name, "bytes": size} for name, size in swept.folders]
    return {"host": host, "removed": swept.counts, "bytes": swept.size, "folders": folders, "dry_run": swept.dry_run}


def clean(
    hosts: Sequence[Host],
    inventory: Inventory,
    days: int,
    cleaned: Callable[[str, Swept], None] = _print,
    *,
    dry_run: bool = False,
) -> None:
    """Cleans the hosts' caches; `cleaned` is called for each host when it is done, on threads.

    With `dry_run` nothing is removed.

    Raises a HostError or PoolError for the hosts that could not be cleaned, after all others have been.
    """
    from skyfab.env.gc import question
    from skyfab.session.ask import Asker
    from skyfab.session.fanout import one_error

    with Asker(hosts, inventory) as asker:

        def one(host: Host) -> None:
            cleaned(host.name, asker.ask_one(question(days, dry_run=dry_run), host))

        outcomes = asker.each(one)
    if failures := [outcome.error for outcome in outcomes if outcome.error is not None]:
        raise one_error(failures, len(hosts))
