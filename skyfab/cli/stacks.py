"""`skyfab stacks`: shows the Python stacks of all workers on the hosts, grouped."""

from __future__ import annotations

import sys
import threading

from skyfab.cli import report
from skyfab.cli.fanout import load
from skyfab.errors import SkyfabError
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.pool.stacks import Stack, describe, groups, parse, script
from skyfab.session.bootstrap import open_shell
from skyfab.session.shell import ScriptFailed
from skyfab.session.transport import transport_for
from skyfab.ui.terminal import clean_lines


def stacks(selection: str | None, inventory: str | None) -> int:
    """Prints the stacks of the workers on the hosts, grouped; returns 3 if a host could not be queried, else 0."""
    found = load(inventory)
    hosts = found.select(selection)
    answers: dict[str, list[Stack]] = {}
    errors: dict[str, Exception] = {}
    threads = [threading.Thread(target=_ask, args=(host, found, answers, errors), daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alike = groups([stack for host in hosts for stack in answers.get(host.name, ())])
    for group in alike:
        print(clean_lines(describe(group)))
    if not alike:
        print("no ranks are at work there", file=sys.stderr)
    for host in hosts:
        if host.name in errors:
            print(report.text(errors[host.name]), file=sys.stderr)
    return 3 if errors else 0


def _ask(host: Host, inventory: Inventory, answers: dict[str, list[Stack]], errors: dict[str, Exception]) -> None:
    try:
        with open_shell(host, transport_for(host, inventory)) as shell:
            answers[host.name] = parse(host.name, shell.run(script()))
    except SkyfabError as error:
        errors[host.name] = error
    except ScriptFailed as error:
        errors[host.name] = SkyfabError(f"cannot look at its ranks: {error.output.strip()[-400:]}", host=host.name)
