"""`skyfab gc`: cleans the caches of hosts and of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from skyfab.cli.command import Hosts, InventoryFile, Json, Option, command
from skyfab.cli.report import print_json

if TYPE_CHECKING:
    from skyfab.env.gc import Swept
    from skyfab.errors import SkyfabError


@command
def gc(
    hosts: Hosts = None,
    inventory: InventoryFile = None,
    days: Annotated[int, Option("remove what has not been used for N days", "N", least=0)] = 30,
    here: Annotated[
        bool, Option("clean the cache of this machine too; without --hosts, clean only this machine's")
    ] = False,
    dry_run: Annotated[bool, Option("show what would be removed, and remove nothing")] = False,
    json_: Json = False,
) -> None:
    """Remove unused files from the caches of hosts.

    Removes environments, packages, interpreters, project files, logs, incomplete files, and the working folders of
    projects with the files that functions wrote; prints names and sizes. Keeps what a pool is using or has used in the
    last hour; --days=0 removes everything else. --here removes wheels, locks and tools from the cache of this machine;
    without a lock, the next pool resolves to the newest versions.

        skyfab gc
        skyfab gc --days=0 --dry-run
        skyfab gc node1
        skyfab gc --hosts=gpu --days=7
        skyfab gc --here
    """
    from skyfab.cli.host_selection import selected
    from skyfab.env.gc import question, sweep_here
    from skyfab.session.ask import Asker
    from skyfab.session.fanout import one_error
    from skyfab.ui.terminal import clean

    known, chosen = selected(hosts, inventory, quiet=json_) if hosts is not None or not here else (None, ())
    found: list[tuple[str, Swept]] = []
    failures: list[SkyfabError] = []

    def report(host: str, swept: Swept) -> None:
        found.append((host, swept))
        if not json_:
            line = clean(f"{host}: {swept}", colour=False)
            print(f"{line}\n", end="", flush=True)  # in one piece: hosts reply at any time

    if here:
        report("this machine", sweep_here(days, dry_run=dry_run))
    if known is not None:
        asked = question(days, dry_run=dry_run)
        with Asker(chosen, known) as asker:
            outcomes = asker.each(lambda host: report(host.name, asker.ask_one(asked, host)))
        failures = [one.error for one in outcomes if one.error is not None]
    if json_:
        print_json([_facts(*one) for one in sorted(found, key=lambda one: one[0])])
    if failures:
        raise one_error(failures, len(chosen))


def _facts(host: str, swept: Swept) -> dict[str, object]:
    folders = [{"name": name, "bytes": size} for name, size in swept.folders]
    return {"host": host, "removed": swept.counts, "bytes": swept.size, "folders": folders, "dry_run": swept.dry_run}
