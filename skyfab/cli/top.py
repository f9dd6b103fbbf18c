"""`skyfab top`: hosts and the runs on them, live; or once, for programs and pipes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from skyfab.cli import report
from skyfab.cli.command import Hosts, InventoryFile, Option, command
from skyfab.cli.sigterm import SIGTERM
from skyfab.ui.terminal import is_rich

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skyfab.inventory.host import Host
    from skyfab.inventory.inventory import Inventory


@command
def top(
    hosts: Hosts = None,
    inventory: InventoryFile = None,
    every: Annotated[int, Option("the time between two updates", "SECONDS")] = 2,
    once: Annotated[bool, Option("print it once and exit")] = False,
    json_: Annotated[bool, Option("print it once, as JSON")] = False,
) -> int:
    """Show hosts and their runs, live.

    Shows what skyfab hosts and skyfab runs show, and keeps one connection to each host open. Keys: arrows select, l
    follows the log of a run, s shows the stacks of its ranks, x stops it, ? lists all keys, q quits. If the output is
    not a terminal, prints it once, and exits with 3 if a host does not respond.

        skyfab top
        skyfab top --hosts=gpu --every=5
        skyfab top --once
        skyfab top --json
    """
    from skyfab.cli.host_selection import selected

    is_live = not once and not json_ and is_rich(sys.stdin, sys.stdout)
    known, chosen = selected(hosts, inventory, quiet=is_live or json_)
    if not is_live:
        return _once(known, chosen, as_json=json_)
    from skyfab.inspect.top.live import Live

    try:
        Live(chosen, known, every).run()
    except KeyboardInterrupt:
        return 130 if SIGTERM.came else 0
    return 0


def _once(inventory: Inventory, hosts: Sequence[Host], *, as_json: bool) -> int:
    from skyfab.cli.hosts import Facts, show_facts
    from skyfab.cli.runs import facts_of, show_runs
    from skyfab.detached.find import runs_of
    from skyfab.inspect.survey import SURVEY
    from skyfab.inspect.top.monitor import RUNS
    from skyfab.inspect.top.snapshot import is_older
    from skyfab.session.ask import Asker

    with Asker(hosts, inventory) as asker:
        surveys = asker.ask(SURVEY)
        asked = asker.ask(RUNS, [one.host for one in surveys if not one.error])
    answered = {one.host.name for one in asked if not one.error}
    runs = runs_of([part for one in asked for part in one.answer or ()], inventory, hosts, "data")
    runs = [run for run in runs if not is_older(run, answered)]
    found = [Facts.of(one) for one in surveys]
    if as_json:
        report.print_json({"hosts": found, "runs": [facts_of(run) for run in runs]})
    else:
        show_facts(found)
        if runs:
            print()
            show_runs(runs)
    return 0 if all(facts.error is None for facts in found) else 3
