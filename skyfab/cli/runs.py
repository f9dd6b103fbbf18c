"""`skyfab runs`, `logs`, `attach` and `stop`: list, follow and stop detached runs."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from skyfab._util.hints import HINTS
from skyfab._util.sizes import counted, seconds_of
from skyfab.cli import report
from skyfab.cli.command import RUN, Hosts, InventoryFile, Json, Option, RunHosts, RunName, command
from skyfab.cli.put import fetch_remembered, mirrored
from skyfab.errors import HostError, PoolError, SkyfabError, UsageError
from skyfab.ui.terminal import clean, clean_lines, settled

if TYPE_CHECKING:
    from skyfab.detached.run import Run
    from skyfab.inventory.inventory import Inventory


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """Which lines of a run are printed, and how."""

    tail: Annotated[int | None, Option("start with the last N lines", "N", default="all")] = None
    since: Annotated[
        str | None, Option("start with lines that are at most this old: 90s, 10m, 2h, 1d", "AGE", default="all")
    ] = None
    timestamps: Annotated[bool, Option("show when each line was written, by the clock of its host")] = False

    @property
    def begin(self) -> float | None:
        """When the first lines were written. Raises UsageError."""
        if self.since is None:
            return None
        seconds = seconds_of(self.since)
        if seconds is None:
            what = f"invalid --since={self.since[:40]}"
            raise UsageError(f"{what}: expected a number with s, m, h or d, as in --since=10m")
        return time.time() - seconds


@command
def runs(hosts: Hosts = None, inventory: InventoryFile = None, json_: Json = False) -> int:
    """List detached runs, the latest first.

    Shows the ID, state, start, ranks, GPUs, hosts, name and last line of each. Runs that wait for GPUs are shown
    as waiting or giving way, servers as starting, ready or restarting. Without --hosts, includes runs on this machine.
    Exits with 3 if a host does not respond.

        skyfab runs
        skyfab runs node1
        skyfab runs --hosts=gpu --json
    """
    from skyfab.detached.noted import used_last

    known, found, errors = _survey(hosts, inventory, None if json_ else show_runs)
    if json_:
        report.print_json([facts_of(run) for run in found])
    elif not found and not errors:
        other = shlex.quote(used_last(known) or "FILE")
        print(HINTS.adapted(f"no runs found; for other hosts: skyfab runs --inventory={other}"), file=sys.stderr)
    return report.print_errors(errors)


def _survey(
    hosts: str | None, inventory: str | None, show: Callable[[Sequence[Run]], None] | None
) -> tuple[Inventory, list[Run], list[SkyfabError]]:
    """The inventory, the runs on its hosts and this machine, and the errors of hosts that do not answer.

    `show` is called with the runs; with those that are known first, if some hosts take long.
    """
    from skyfab.cli.host_selection import selected
    from skyfab.detached.find import survey
    from skyfab.session.ask import Asker

    known, chosen = selected(hosts, inventory, quiet=show is None, here=True)
    shown: dict[str, list[str]] = {}

    def show_known(found: list[Run]) -> bool:
        assert show is not None
        show(found)
        shown.update((run.id, run.silent) for run in found)
        return False

    with Asker(chosen, known) as asker:
        found, errors = survey(asker, enough=None if show is None else show_known)
    if show is not None:
        show([run for run in found if shown.get(run.id) != run.silent])
    return known, found, errors


def show_runs(found: Sequence[Run]) -> None:
    """Prints a table of runs, if there are any."""
    from skyfab.ui.table import table

    if not found:
        return
    head = ("run", "state", "started", "ranks", "GPUs", "hosts", "name", "last line")
    optional = ("GPUs", "ranks", "started", "hosts")
    table(head, [_row(run) for run in found], right=("ranks",), optional=optional, widest={"hosts": 24, "name": 24})


def _row(run: Run) -> tuple[str, ...]:
    hosts = ", ".join(run.hosts)
    for what, names in (("not asked", run.unasked), ("no response", run.silent)):
        hosts += f" ({what}: {', '.join(names)})" if names else ""
    state, last = run.summary
    failed = f", {len(run.failed)} failed" if run.state == "running" and run.failed else ""
    return (run.id[:8], state + failed, _moment(run.started), str(run.world_size), _busy(run), hosts, run.name, last)


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
        "no_response": run.silent,
        "gpus": {
            part.host: [{"percent": gpu.percent, "bytes": gpu.memory} for gpu in part.gpus or ()] for part in run.parts
        },
        "last": run.last,
        "error": run.error,
        "phase": None if run.phase is None else asdict(run.phase),
    }


def _busy(run: Run) -> str:
    """How many GPUs its hosts have, and while it runs, how busy they are on average."""
    usages = [gpu for part in run.parts for gpu in part.gpus or ()]
    known = [gpu.percent for gpu in usages if gpu.percent is not None]
    if run.state != "running" or not known:
        is_known = usages and all(part.gpus is not None for part in run.parts)
        return str(len(usages)) if is_known else "–"  # without a vendor's tool, a host lists none that it has
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
    follow: Annotated[bool, Option("print new lines until the run has ended", short="f")] = False,
    rank: Annotated[int | None, Option("print only the lines of this rank", "N", least=0, default="all")] = None,
    *,
    options: LogOptions,
) -> int:
    """Print the output of a detached run.

    Merges the lines of all hosts by time, each with its host and rank. What a rank wrote to stderr is printed to
    stderr. Exits with 3 if a host does not respond, after the lines of the others.

        skyfab logs 3f2a91c0
        skyfab logs night -f --rank=0
        skyfab logs night --since=10m --timestamps
    """
    from skyfab.detached.find import attached
    from skyfab.detached.sweep import LABEL

    begin = options.begin
    try:
        with attached(id_, hosts, inventory=inventory, soon=True) as found, mirrored(found):
            _print(found, options, follow=follow, rank=rank, since=begin)
    except KeyboardInterrupt:
        if not follow:
            raise
        if sys.stderr.isatty():
            print(file=sys.stderr)  # after the ^C that the terminal shows
        return 130
    if follow:
        fetch_remembered(found)
    if found.state == "failed":
        why = f": {clean(found.error, colour=False)}" if found.error else ""
        is_sweep = found.function.startswith(LABEL)
        more = f"which: skyfab sweep {id_}" if is_sweep else f"the traceback: skyfab attach {id_}"
        print(HINTS.adapted(f"the run failed{why}\nto see {more}"), file=sys.stderr)
    elif found.state == "lost":
        print(HINTS.adapted(f"the run was lost; to see why: skyfab attach {id_}"), file=sys.stderr)
    return 0


@command
def attach(id_: RunName, hosts: RunHosts = None, inventory: InventoryFile = None, *, options: LogOptions) -> int:
    """Follow a detached run until it has ended.

    Ctrl-C stops following, but not the run. Exits with 1 if the run failed, and shows why. If it has ended on all hosts
    that respond, exits with 3 instead of waiting for the others.

        skyfab attach 3f2a91c0
        skyfab attach night --tail=20
    """
    from skyfab.detached.find import attached
    from skyfab.ui.failure import left_running

    begin = options.begin
    following = attached(id_, hosts, inventory=inventory, results="data", soon=True)  # a failure is only printed
    with left_running(id_), following as found:
        missing: SkyfabError | None = None
        if found.state == "running":
            name = clean(f"{found.name} ({found.id[:8]}), running on {', '.join(found.hosts)}", colour=False)
            print(f"following {name}; Ctrl-C leaves it running", file=sys.stderr)
        try:
            with mirrored(found):
                _print(found, options, follow=True, since=begin)
        except (HostError, PoolError) as error:
            if not found.silent:
                raise
            missing = error
        state = found.state
        print(f"{clean(found.name, colour=False)}: {state}", file=sys.stderr)
        if not fetch_remembered(found):
            for files in found.files():
                print(clean_lines(str(files)), file=sys.stderr)
        if missing is not None:
            print(report.text(missing), file=sys.stderr)
        if state in ("failed", "lost"):
            found.result() if missing is None else found.raise_failure()
    if missing is not None:
        return 3
    if state == "done" and not re.search(r"\.py$| ", found.function):  # a script returns nothing
        print(f'to get the result: skyfab.attach("{found.id[:8]}").result()', file=sys.stderr)
    return 0 if state == "done" else 1


def _print(run: Run, options: LogOptions, **more: Any) -> None:
    """Prints a run's lines as they are shown while it is not detached."""
    from skyfab.ui.display import line_format
    from skyfab.ui.events import Output
    from skyfab.ui.suppressed import is_noise
    from skyfab.ui.terminal import is_rich, put

    shown = line_format()
    together = is_rich(sys.stdout, sys.stderr)

    def tell_failure(host: str, rank: int) -> None:
        text = f"{host}[{rank}] has failed, the other ranks are still running; to stop them: skyfab stop {run.id[:8]}"
        print(HINTS.adapted(clean(text, colour=False)), file=sys.stderr)

    for line in run.lines(tail=options.tail, trouble=_tell, failed=tell_failure, soon=True, **more):
        if is_noise(line.text):
            continue
        event = Output(
            host=line.host,
            rank=None if run.world_size == 1 else line.rank,
            stream="stdout" if line.stream == "out" else "stderr",
            text=(_stamp(line.time) if options.timestamps else "") + settled(line.text),
        )
        put(sys.stdout if line.stream == "out" or together else sys.stderr, shown(event))


def _stamp(seconds: float) -> str:
    return f"{time.strftime('%m-%d %H:%M:%S', time.localtime(seconds))}.{int(seconds * 1000) % 1000:03d} "


def _tell(error: SkyfabError) -> None:
    """Prints an error in a single write, since several threads may do so at the same time."""
    sys.stderr.write(clean(f"{error.host}: {error.message}; trying again", colour=False) + "\n")


@command
def stop(
    id_: Annotated[Sequence[str], Option(RUN, "RUN", plain=True)] = (),
    hosts: RunHosts = None,
    inventory: InventoryFile = None,
    all_: Annotated[bool, Option("stop all runs, after confirmation")] = False,
    yes: Annotated[bool, Option("do not ask for confirmation")] = False,
) -> int:
    """Stop detached runs on all their hosts.

    Sends SIGTERM to the ranks and their child processes, and SIGKILL two seconds later. Keeps what a run has written.
    A run that has already ended is left as it is. --all lists the runs on all hosts and this machine, or on --hosts,
    and asks before it stops them. Exits with 3 if a host does not respond, and with 1 if you decline.

        skyfab stop 3f2a91c0
        skyfab stop --all
    """
    from skyfab.detached.find import attached

    if all_ == bool(id_):
        raise UsageError("expected the ID or name of a run, or --all", hint="to list runs: skyfab runs")
    for name in id_:
        with attached(name, hosts, inventory=inventory, soon=True) as found:
            _stop(found)
    return _stop_all(hosts, inventory, yes=yes) if all_ else 0


def _stop(run: Run) -> None:
    name = clean(run.name, colour=False)
    if run.has_ended:
        print(f"{run.id[:8]} {name} has already ended: {run.state}")
    else:
        if run.silent and (reached := [host for host in run.hosts if host not in run.silent]):
            silent = ", ".join(run.silent)
            print(f"stopping on {', '.join(reached)}; may continue on {silent}: try again later", file=sys.stderr)
        run.stop()
        print(f"{run.id[:8]}  {run.status}  {name}")


def _stop_all(hosts: str | None, inventory: str | None, *, yes: bool) -> int:
    from skyfab.ui.prompt import answer

    def running(found: Sequence[Run]) -> list[Run]:
        return [run for run in found if run.state == "running"]

    _, found, errors = _survey(hosts, inventory, lambda found: show_runs(running(found)))
    if found := running(found):
        question = f"stop {counted(len(found), 'run')}? [y/N] "
        if not yes and answer(question, "add --yes").lower() not in ("y", "yes"):
            return 1
    elif not errors:
        print("no runs are running", file=sys.stderr)
    for run in found:
        try:
            _stop(run)
        except SkyfabError as error:  # the others are stopped all the same
            errors.append(error)
    return report.print_errors(errors)
