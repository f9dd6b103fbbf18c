"""`skyfab runs`, `logs`, `attach` and `stop`: list, follow and stop detached runs."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

from skyfab.cli import report
from skyfab.cli.command import Hosts, InventoryFile, Json, Option, RunHosts, RunName, command
from skyfab.errors import UsageError
from skyfab.ui.hints import HINTS
from skyfab.ui.terminal import clean, clean_lines, settled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skyfab.detached.run import Run
    from skyfab.errors import SkyfabError

Tail = Annotated[int | None, Option("of what is there already, only so many lines", "N", default="all")]
Since = Annotated[
    str | None,
    Option("of what is there already, only what is not older: 90s, 10m, 2h, 1d", "AGE", default="all"),
]
Timestamps = Annotated[bool, Option("when each line was written, by the clock of its host")]
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@command
def runs(hosts: Hosts = None, inventory: InventoryFile = None, json_: Json = False) -> int:
    """List detached runs, the latest first.

    For each its id, state, start, ranks, GPUs, hosts, name and last line. Without --hosts also those on this machine.
    Ends with 3 when a host cannot be asked.

        skyfab runs
        skyfab runs node1
        skyfab runs --hosts=gpu --json
    """
    import json

    from skyfab.cli.host_selection import selected
    from skyfab.detached.run import survey

    found, errors = survey(*selected(hosts, inventory, quiet=json_, here=True))
    if json_:
        print(json.dumps([facts_of(run) for run in found], indent=2, ensure_ascii=False))
    elif found:
        show_runs(found)
    elif not errors:
        print("no runs there", file=sys.stderr)
    for error in errors:
        print(report.text(error), file=sys.stderr)
    return 3 if errors else 0


def show_runs(found: Sequence[Run]) -> None:
    """Prints a table of runs."""
    from skyfab.ui.table import table

    head = ("run", "state", "started", "ranks", "GPUs", "hosts", "name", "last line")
    table(head, [_row(run) for run in found], right=("ranks",))


def _row(run: Run) -> tuple[str, ...]:
    hosts = ", ".join(run.hosts)
    if run.unasked:
        hosts += f" (not asked: {', '.join(run.unasked)})"
    state = f"{run.state}, {len(run.failed)} failed" if run.state == "running" and run.failed else run.state
    return (run.id[:8], state, _moment(run.started), str(run.world_size), _busy(run), hosts, run.name, run.last)


def facts_of(run: Run) -> dict[str, Any]:
    """A run, as `--json` prints it. Programs rely on the names."""
    return {
        "id": run.id,
        "name": run.name,
        "function": run.function,
        "state": run.state,
        "started": run.started,
        "ranks": run.world_size,
        "failed": [rank for _, rank in run.failed],
        "hosts": run.hosts,
        "not_asked": run.unasked,
        "gpus": {part.host: [{"percent": gpu.percent, "bytes": gpu.memory} for gpu in part.gpus] for part in run.parts},
        "last": run.last,
    }


def _busy(run: Run) -> str:
    """How many GPUs its hosts have, and while it runs, how busy they are on average."""
    usages = [gpu for part in run.parts for gpu in part.gpus]
    known = [gpu.percent for gpu in usages if gpu.percent is not None]
    if run.state != "running" or not known:
        return str(len(usages)) if usages else "–"
    return f"{len(usages)} at {sum(known) / len(known):.0f} %"


def _moment(started: float) -> str:
    """A time by this machine's clock; with the year if that is not this one."""
    when = time.localtime(started)
    return time.strftime("%m-%d %H:%M" if when.tm_year == time.localtime().tm_year else "%Y-%m-%d %H:%M", when)


@command
def logs(
    id_: RunName,
    hosts: RunHosts = None,
    inventory: InventoryFile = None,
    follow: Annotated[bool, Option("until it is over", short="f")] = False,
    rank: Annotated[int | None, Option("only what this one has written", "N", least=0, default="all")] = None,
    tail: Tail = None,
    since: Since = None,
    timestamps: Timestamps = False,
) -> int:
    """Print what a detached run has written.

    All hosts together, in the order of time, each line with its host and rank; what went to stderr goes there.

        skyfab logs 3f2a91c0
        skyfab logs night -f --rank=0
        skyfab logs night --since=10m --timestamps
    """
    from skyfab.detached.run import attach

    begin = _age(since)
    found = attach(id_, hosts, inventory=inventory)
    try:
        _print(found, timestamps=timestamps, follow=follow, rank=rank, tail=tail, since=begin)
    except KeyboardInterrupt:
        if not follow:
            raise
        if sys.stderr.isatty():
            print(file=sys.stderr)  # after the ^C that the terminal shows
        return 130
    return 0


@command
def attach(
    id_: RunName,
    hosts: RunHosts = None,
    inventory: InventoryFile = None,
    tail: Tail = None,
    since: Since = None,
    timestamps: Timestamps = False,
) -> int:
    """Follow a detached run until it is over.

    Ctrl-C leaves it alone. Ends with 1 when it failed, and says how.

        skyfab attach 3f2a91c0
        skyfab attach night --tail=20
    """
    from skyfab.detached.run import attach

    begin = _age(since)
    found = attach(id_, hosts, inventory=inventory, results="data")  # a failure is only printed
    try:
        _print(found, timestamps=timestamps, follow=True, tail=tail, since=begin)
    except KeyboardInterrupt:
        print(HINTS.adapted(f"\nit goes on; to end it: skyfab stop {found.id[:8]}"), file=sys.stderr)
        return 130
    state = found.state
    print(f"{clean(found.name, colour=False)}: {state}", file=sys.stderr)
    for files in found.files():
        print(clean_lines(str(files)), file=sys.stderr)
    if state in ("failed", "lost"):
        found.result()
    if state == "done":
        print(f'its result: skyfab.attach("{found.id[:8]}").result()', file=sys.stderr)
    return 0 if state == "done" else 1


def _age(text: str | None) -> float | None:
    """The moment that is so long ago. Raises UsageError."""
    if text is None:
        return None
    number, unit = (text[:-1], text[-1]) if text[-1] in _UNITS else (text, "s")
    if not number.isascii() or not number.isdigit() or len(number) > 9:
        raise UsageError(f"--since={text[:40]}: an age is a number with s, m, h or d, for example --since=10m")
    return time.time() - int(number) * _UNITS[unit]


def _print(run: Run, *, timestamps: bool, **options: Any) -> None:
    """Prints a run's lines as they are shown while it is not detached."""
    from skyfab.ui.display import line_format
    from skyfab.ui.events import Output
    from skyfab.ui.suppressed import is_noise
    from skyfab.ui.terminal import is_rich, put

    where = {number: part.host for part in run.parts for number in part.about.ranks}
    shown = line_format(sys.stdout, sys.stderr)
    together = is_rich(sys.stdout, sys.stderr)
    has_failed = run.state in ("failed", "lost")

    def tell_failure(host: str, rank: int) -> None:
        text = f"{host}[{rank}] has failed, and the others go on; to end them: skyfab stop {run.id[:8]}"
        print(HINTS.adapted(clean(text, colour=False)), file=sys.stderr)

    for line in run.lines(trouble=_tell, failed=tell_failure, **options):
        if is_noise(line.text) and not has_failed:
            continue
        moment = f"{time.strftime('%m-%d %H:%M:%S', time.localtime(line.time))}.{int(line.time * 1000) % 1000:03d} "
        event = Output(
            host=where.get(line.rank, "?"),
            rank=None if run.world_size == 1 else line.rank,
            stream="stdout" if line.stream == "out" else "stderr",
            text=(moment if timestamps else "") + settled(line.text),
        )
        put(sys.stdout if line.stream == "out" or together else sys.stderr, shown(event))


def _tell(error: SkyfabError) -> None:
    """Prints an error in a single write, since several threads may do so at the same time."""
    sys.stderr.write(clean(f"{error.host}: {error.message}; trying again", colour=False) + "\n")


@command
def stop(id_: RunName, hosts: RunHosts = None, inventory: InventoryFile = None) -> None:
    """End a detached run on all its hosts.

    Its ranks and what they started: SIGTERM, two seconds to save something, then SIGKILL. What it wrote stays. One that
    has ended already is left as it is.

        skyfab stop 3f2a91c0
    """
    from skyfab.detached.run import attach

    found = attach(id_, hosts, inventory=inventory)
    if found.has_ended:
        print(f"{found.id[:8]} had already ended: {found.state}  {clean(found.name, colour=False)}")
        return
    found.stop()
    print(f"{found.id[:8]}  {found.status}  {clean(found.name, colour=False)}")
