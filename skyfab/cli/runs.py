"""`skyfab runs`, `logs`, `attach` and `stop`: list, follow and stop detached runs."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

from skyfab.cli import report
from skyfab.cli.command import Hosts, InventoryFile, Option, RunName, command
from skyfab.ui.terminal import clean, counted

if TYPE_CHECKING:
    from skyfab.detached.folder import Part
    from skyfab.detached.run import Run
    from skyfab.errors import SkyfabError


@command
def runs(hosts: Hosts = None, inventory: InventoryFile = None) -> int:
    """List detached runs, the latest first.

    For each its id, state, age, ranks and hosts, name and last line. Ends with 3 when a host cannot be asked.

        skyfab runs
        skyfab runs --hosts=gpu
    """
    from skyfab.detached.run import survey
    from skyfab.inventory.inventory import Inventory

    found, errors = survey(Inventory.of(inventory), hosts)
    for run in found:
        print("\n".join(_lines(run)))
    if not found and not errors:
        print("no runs on these hosts", file=sys.stderr)
    for error in errors:
        print(report.text(error), file=sys.stderr)
    return 3 if errors else 0


def _lines(run: Run) -> list[str]:
    ranks = counted(run.world_size, "rank")
    state = run.state
    where = ", ".join(run.hosts)
    if run.unasked:
        where += f" (not asked: {', '.join(run.unasked)})"
    first = f"{run.id[:8]}  {state:<11} {_age(run.started):>8}  {ranks} on {where}  {run.name}"
    gpus = [f"{part.host} {_busy(part)}" for part in run.parts if part.gpus and state == "running"]
    last = next((part.last for part in run.parts if part.last), "")
    more = [f"          gpus: {'; '.join(gpus)}"] if gpus else []
    return [clean(line, colour=False) for line in [first, *more, *([f"          {last[:200]}"] if last else [])]]


def _busy(part: Part) -> str:
    shown = []
    for gpu in part.gpus[:16]:
        busy, _, used = gpu.partition(",")
        shown.append(f"{busy.strip()} % {used.strip()} MB")
    return ", ".join(shown)


def _age(started: float) -> str:
    """The time since then, by this machine's clock. The hosts' clocks may differ."""
    seconds = max(0.0, time.time() - started)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


@command
def logs(
    id_: RunName,
    hosts: Hosts = None,
    inventory: InventoryFile = None,
    follow: Annotated[bool, Option("until it is over", short="f")] = False,
    rank: Annotated[int | None, Option("only what this one has written", "N", least=0)] = None,
) -> None:
    """Print what a detached run has written.

    Each line with its host and rank; what went to stderr goes there.

        skyfab logs 3f2a91c0
        skyfab logs night -f --rank=0
    """
    from skyfab.detached.run import attach

    _print(attach(id_, hosts, inventory=inventory), follow=follow, rank=rank)


@command
def attach(id_: RunName, hosts: Hosts = None, inventory: InventoryFile = None) -> int:
    """Follow a detached run until it is over.

    Ctrl-C leaves it alone. Ends with 1 when it failed, and says how.

        skyfab attach 3f2a91c0
    """
    from skyfab.detached.run import attach

    found = attach(id_, hosts, inventory=inventory, results="data")  # a failure is only printed
    try:
        _print(found, follow=True, rank=None)
    except KeyboardInterrupt:
        print(f"\nit goes on; to end it: skyfab stop {found.id[:8]}", file=sys.stderr)
        return 130
    state = found.state
    print(f"{found.name}: {state}", file=sys.stderr)
    for files in found.files():
        print(clean(str(files), colour=False), file=sys.stderr)
    if state in ("failed", "lost"):
        found.result()
    if state == "done":
        print(f'its result: skyfab.attach("{found.id[:8]}").result()', file=sys.stderr)
    return 0 if state == "done" else 1


def _print(run: Run, *, follow: bool, rank: int | None) -> None:
    where = {number: part.host for part in run.parts for number in part.about.ranks}
    for number, stream, line in run.logs(follow=follow, rank=rank, trouble=_tell):
        place = where.get(number, "?") if run.world_size == 1 else f"{where.get(number, '?')}[{number}]"
        out = sys.stdout if stream == "out" else sys.stderr
        print(f"{place} {clean(line, colour=out.isatty())}", file=out, flush=True)


def _tell(error: SkyfabError) -> None:
    """Prints an error in a single write, since several threads may do so at the same time."""
    sys.stderr.write(clean(f"{error.host}: {error.message}; trying again", colour=False) + "\n")


@command
def stop(id_: RunName, hosts: Hosts = None, inventory: InventoryFile = None) -> None:
    """End a detached run on all its hosts.

    Its ranks and what they started; what it wrote stays.

        skyfab stop 3f2a91c0
    """
    from skyfab.detached.run import attach

    found = attach(id_, hosts, inventory=inventory)
    found.stop()
    print(f"{found.id[:8]}  {found.status}  {clean(found.name, colour=False)}")
