"""`skyfab sweep`: runs the trials of a grid over all slots of all hosts, and shows them in a table."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
import re
import secrets
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path, PurePosixPath
from signal import Signals
from typing import TYPE_CHECKING, Annotated, Any, Final

from skyfab._util import brackets
from skyfab._util.atomic import write
from skyfab._util.hints import HINTS
from skyfab._util.sizes import counted
from skyfab.cli.command import Option, command
from skyfab.cli.run_options import ScriptOptions
from skyfab.errors import UsageError, printable
from skyfab.ui.terminal import LiveLines, clean, is_rich, put

if TYPE_CHECKING:
    from skyfab.detached.run import Run
    from skyfab.detached.sweep import Trial
    from skyfab.pool.compute import Compute
    from skyfab.pool.node import Node

_PACE: Final = 1.0
"""Seconds between two queries of the hosts."""
MOST: Final = 10_000
"""Trials of a sweep, at most."""
_NAME: Final = 100
"""Characters of a folder's name, without the number."""
_COMMENT: Final = re.compile(r"""("(?:\\.|[^"\\])*"|'[^']*'|\\.)|(?<!\S)#.*""")
"""A comment, or in its first group what cannot begin one. As in shells, it begins a word."""
_RANGE: Final = re.compile(r"(?!\.\.$)([^/]*?)\.\.([^/]*)")  # not a path, such as ../data


@command
def sweep(
    target: Annotated[str, Option("the script to run, or the name or ID of a sweep to show", "FILE.py|SWEEP")],
    *arguments: Annotated[str, Option("more arguments, for options of the script", "[-- ARGS ...]")],
    values: Annotated[Sequence[str], Option("values to try: lr=1e-3,1e-4 seed=1..5", "NAME=VALUES", plain=True)] = (),
    grid: Annotated[str | None, Option("a file with the arguments of one trial on each line", "FILE")] = None,
    gpus: Annotated[str, Option("GPUs for each trial, or a share of one, such as 0.5", "N")] = "0",
    slots: Annotated[int | None, Option("trials at a time on a host", "N", default="the inventory's slots")] = None,
    detach: Annotated[bool, Option("start the sweep and return")] = False,
    keep_going: Annotated[bool, Option("begin new trials even after one has failed")] = False,
    resume: Annotated[bool, Option("run only the trials that the last sweep of this script has not done")] = False,
    follow: Annotated[bool, Option("show a running sweep until it has ended", short="f")] = False,
    name: Annotated[str | None, Option("a name for the sweep", "NAME", default="that of the script")] = None,
    csv_: Annotated[str | None, Option("write the table to this file; - is stdout", "FILE")] = None,
    json_: Annotated[str | None, Option("write the results to this file, as JSON; - is stdout", "FILE")] = None,
    options: ScriptOptions,
) -> int:
    """Run a script once for each combination of values.

    Each argument NAME=VALUES lists values to try: lr=1e-3,1e-4 or seed=1..5. Each combination, such as lr=1e-3 seed=1,
    is a trial: the script runs with these arguments in a slot of a host, or with --gpus on its own GPUs. Each trial
    runs in its own folder on its host, sweeps/NAME-DATE/0001-lr=1e-3-seed=1 in the working folder; its log.txt and
    trial.json are in the same folder. The table shows what the script passes to skyfab.report(loss=0.3).

    The sweep continues on the hosts if this program ends; skyfab sweep NAME shows the table. At a terminal, Ctrl-C asks
    whether to stop or detach. After a failure, no new trials begin unless --keep-going is given. The same command with
    --resume runs the trials that failed, were stopped or lost, or have not begun. Exits with 1 if a trial failed, with
    3 if one was lost with its host, or if its state is unknown because a host does not respond.

        skyfab sweep train.py lr=1e-3,1e-4 seed=1..5 --gpus=1
        skyfab sweep train.py --detach --name=night -- --lr=1e-3,1e-4
        skyfab sweep night --csv=night.csv
    """
    from skyfab.calls.call import as_function, check_gpus
    from skyfab.cli.detach import tell_how_to_attach
    from skyfab.cli.run import parsed
    from skyfab.cli.run_environment import pool_of, project_of
    from skyfab.cli.run_options import GpuOptions
    from skyfab.detached.sweep import LABEL
    from skyfab.host.sweep import sweep as drive
    from skyfab.plugins.base import OwnPort

    results = [(csv_, _csv), (json_, _json)]
    for path in filter(None, (csv_, json_)):
        place = Path(path).expanduser()
        if path != "-" and (place.is_dir() or not os.access(place.parent, os.W_OK)):
            why = "it is a folder" if place.is_dir() else "its folder does not exist, or is not writable"
            raise UsageError(f"cannot write {path}: {why}")
    if not target.endswith(".py"):
        if resume or values or arguments:
            hint = f"skyfab sweep {shlex.quote(target)} shows it; to resume it, repeat its command with --resume"
            raise UsageError(f"not a script (.py): {target}", hint=hint)
        return _show(target, options.hosts, options.inventory, results, follow=follow)
    script, _ = parsed(target, task="sweep")
    if bare := [word for word in values if "=" not in word]:
        hint = "write NAME=VALUES, as in lr=1e-3,1e-4; other arguments of the script go after --"
        raise UsageError(f"no values in {bare[0]!r}", hint=hint)
    words = trials_of([*values, *arguments], grid)
    count: Any = int(gpus) if gpus.isdecimal() else float(gpus) if re.fullmatch(r"0?\.\d+", gpus) else gpus
    check_gpus(count)
    settings = project_of(options, script)
    name = name or script.stem
    options = GpuOptions(when_free=count > 0).added_to(options)
    with pool_of(options, script, settings, ranks=1, here=1, plugins=[OwnPort()]) as compute:
        hosts = [node.host for node in compute.hosts]
        label = f"{LABEL}{target}"
        before = _known(name, label, compute) if resume else {}
        if resume:
            done = [before[one].state == "done" for one in words if one in before]
            what = f"{sum(done)} are done" if done else "the last sweep had none"
            print(f"of {counted(len(words), 'trial')}, {what}", file=sys.stderr)
        plan = {
            "name": name,
            "script": script.name,
            "trials": _planned(words, before, name),
            "hosts": [host.name for host in hosts],
            "slots": _slots(compute.hosts, count, slots),
            "share": str(count) if 0 < count < 1 else None,
            "keep_going": keep_going,
            "secret": secrets.token_hex(32),
        }
        started = as_function(drive)
        started.label = label
        run = compute.launch(started(plan), name=name)
        known = compute.inventory
    if detach:
        if not keep_going:
            print("after a failure, no new trials begin unless --keep-going is given", file=sys.stderr)
        tell_how_to_attach(run, name, container=options.container)
        return 0
    return _show(run.id, hosts, known, results, follow=True, is_own=True)


def _slots(nodes: Sequence[Node], gpus: float, limit: int | None) -> list[Sequence[str | None]]:
    """The slots of each host; a slot with its own GPUs is the value of CUDA_VISIBLE_DEVICES. Raises UsageError."""
    if not gpus:
        return [[None] * (limit or node.host.slots) for node in nodes]
    size, copies = max(1, int(gpus)), max(1, int(1 / gpus + 1e-6))
    found: list[Sequence[str | None]] = []
    for node in nodes:
        sets = [node.gpus[at : at + size] for at in range(0, len(node.gpus) - size + 1, size)]
        found.append([",".join(map(str, one)) for one in sets * copies][:limit])
    if not any(found):
        most = max(len(node.gpus) for node in nodes)
        raise UsageError(f"no host has {counted(size, 'GPU')} for a trial", hint=f"--gpus can be at most {most}")
    return found


def _known(name: str, label: str, compute: Compute) -> dict[tuple[str, ...], Trial]:
    """The trials of the last sweep of this script with this name. Raises UsageError if it is not over."""
    from skyfab.detached.find import attached
    from skyfab.detached.sweep import Sweep

    def is_of_this(run: Run) -> bool:
        """Whether it is of the same script in the same folder, or in a copy, whose name ends in a number."""
        folders = {re.sub(r"\.[0-9a-f]{8}$", "", part.about.workdir) for part in run.parts}
        return run.function == label and not folders.isdisjoint(node.workdir.sent for node in compute.hosts)

    hosts = [node.host for node in compute.hosts]
    with attached(name, hosts, inventory=compute.inventory, results="data", suits=is_of_this) as run:
        found = {trial.words: trial for trial in Sweep(run).look()}
        if run.state == "running":
            raise UsageError(f"sweep {name} is still running", hint=f"to end it: skyfab stop {name}")
        for host in run.silent:
            print(f"{host}: no response; trials whose end no other host knows count as lost", file=sys.stderr)
    return found


def _planned(
    words: Sequence[tuple[str, ...]], before: Mapping[tuple[str, ...], Trial], name: str
) -> list[dict[str, Any]]:
    """All trials; those that are done already are listed with their results. New ones have numbers of their own."""
    root = f"sweeps/{re.sub(r'[^A-Za-z0-9_.-]+', '_', name)}-{time.strftime('%m%d-%H%M%S')}"
    used = (re.match(r"\d{1,9}", PurePosixPath(old.folder).name) for old in before.values())
    unused = itertools.count(max((int(number[0]) for number in used if number), default=0) + 1)
    found: list[dict[str, Any]] = []
    for number, (one, named) in enumerate(zip(words, names_of(words), strict=True), 1):
        old = before.get(one)
        if old is not None and old.state == "done":
            found.append(asdict(old) | {"trial": number})
        else:
            place = old.folder if old is not None and old.folder else f"{root}/{next(unused):04}-{named}".rstrip("-")
            found.append({"trial": number, "state": "waiting", "words": one, "folder": place})
    return found


# ---- trials: all combinations of the values that were typed, or one for each line of a file


def trials_of(patterns: Sequence[str], grid: str | None = None) -> list[tuple[str, ...]]:
    """The words for the script, for each trial. Raises UsageError.

    >>> trials_of(["lr=1e-3,1e-4", "--fast"])
    [('lr=1e-3', '--fast'), ('lr=1e-4', '--fast')]
    """
    if not patterns and grid is None:
        raise UsageError("no trials", hint="add values to try, as in lr=1e-3,1e-4 seed=1..5, or --grid=FILE")
    columns = [_values(pattern) for pattern in patterns]
    lines = [()] if grid is None else _lines(Path(grid).expanduser())
    count = len(lines) * math.prod(map(len, columns))
    if count > MOST:
        raise UsageError(f"{counted(count, 'trial')}: a sweep has at most {MOST:,}", hint="use fewer values")
    for option, word in itertools.pairwise(patterns):
        if count == 1 and option.startswith("-") and "=" not in option and "," in word:
            raise UsageError(f"{option} {word} is one trial", hint=f"to try each value: {option}={word}")
    found = [(*line, *words) for line in lines for words in itertools.product(*columns)]
    if len(set(found)) < count:
        ((twice, _),) = Counter(found).most_common(1)
        raise UsageError(f"the same trial twice: {shlex.join(twice)}", hint="to repeat trials, add a seed: seed=1..3")
    return found


def _values(pattern: str) -> Sequence[str]:
    """The words that a pattern expands to."""
    name, equals, text = pattern.partition("=")
    if not equals:
        return [pattern]
    found: list[str] = []
    for value in brackets.split(text):
        if not text:
            raise UsageError(f"no values in {pattern!r}", hint=f"write values after the =: {name}=1e-3,1e-4")
        if not value:
            raise UsageError(f"an empty value in {pattern!r}", hint="write no space after a comma, or use --grid=FILE")
        match = _RANGE.fullmatch(value)
        found += [f"{name}={one}" for one in ([value] if match is None else _numbers(match[1], match[2]))]
    return found


def _numbers(first: str, last: str) -> list[str]:
    try:
        start, end = int(first), int(last)
    except ValueError:
        raise UsageError(f"{first}..{last}: ranges need whole numbers", hint="list the values: 0.1,0.2") from None
    if not 0 <= end - start < MOST:
        how_many = "no trials" if end < start else f"more than {MOST:,} trials"
        raise UsageError(f"{first}..{last} gives {how_many}", hint=f"smallest first, as in 1..5; {MOST:,} at most")
    width = len(first) if first.startswith("0") else 0  # 01..10
    return [f"{number:0{width}}" for number in range(start, end + 1)]


def _lines(path: Path) -> list[tuple[str, ...]]:
    from skyfab.calls.manifest import text_of

    found = []
    for number, line in enumerate(text_of(path).splitlines(), 1):
        try:
            found.append(tuple(shlex.split(_COMMENT.sub(lambda part: part[1] or "", line))))
        except ValueError as error:
            raise UsageError(f"{path}: line {number}: {str(error).lower()}") from None
    if not any(found):
        raise UsageError(f"{path} contains no trials", hint="each line has the arguments of a trial: lr=1e-3 seed=1")
    return [words for words in found if words]


def names_of(trials: Sequence[Sequence[str]]) -> list[str]:
    """A name for the folder of each trial: the words that not all trials have.

    >>> names_of([["--lr=1e-3", "data=a/b"], ["--lr=1e-4", "data=a/b"]])
    ['lr=1e-3', 'lr=1e-4']
    """
    common = set.intersection(*map(set, trials)) if len(trials) > 1 else set()
    names = ["-".join(word.lstrip("-") for word in words if word not in common) for words in trials]
    return [re.sub(r"[^\w.=+-]+", "_", name, flags=re.ASCII)[:_NAME] for name in names]


# ---- a sweep that was started


def _show(name: str, hosts: Any, inventory: Any, results: Results, *, follow: bool, is_own: bool = False) -> int:
    """Shows a sweep, with `follow` until it has ended; Ctrl-C leaves it running, unless it `is_own`. Exit code."""
    from skyfab.cli.detach import asked, tell_how_to_attach
    from skyfab.detached.find import attached
    from skyfab.detached.sweep import Sweep
    from skyfab.ui.table import aligned

    live, before = LiveLines(), ""
    with attached(name, hosts, inventory=inventory, results="data") as run:
        sweep = Sweep(run)
        while True:
            try:
                trials = sweep.look()
                if (trials and not follow) or (run.parts and run.state != "running"):
                    break
                if is_rich(sys.stdout):
                    shown = [trial for trial in trials if trial.state not in ("waiting", "unknown")]
                    lines = aligned(*_table(sorted(shown, key=lambda trial: trial.state != "running"))).splitlines()
                    put(sys.stdout, live.frame("", [_summary(trials, run), *lines]))
                elif _summary(trials, run) != before:
                    before = _summary(trials, run)
                    print(before, file=sys.stderr)
                time.sleep(_PACE)
            except KeyboardInterrupt as error:
                put(sys.stdout, live.frame("", []))
                choice = asked(lambda: False) if is_own else "leave"
                if choice == "stop":
                    run.stop()
                    text = f"sweep {run.name} was stopped on {', '.join(run.hosts)}: {_counts(sweep.look())}"
                    vars(error)["stopped"] = clean(text, colour=False)
                    raise
                if choice != "continue":
                    tell_how_to_attach(run, run.name)
                    return 0 if is_own else 130
        put(sys.stdout, live.frame("", []))
        if not trials:
            run.raise_failure()  # it could not start
        _report(trials, run, results)
    states = {trial.state for trial in trials}
    if "failed" in states:
        return 1
    is_incomplete = "lost" in states or (_missing(run) and states != {"done"})
    return 3 if is_incomplete else int(bool(states & {"stopped", "not started"}))


def _missing(run: Run) -> list[str]:
    """Hosts of the run whose notes were not read."""
    return [*run.silent, *run.unasked]


def _report(trials: Sequence[Trial], run: Run, results: Results) -> None:
    """Prints the table and what to do next, and writes files of results."""
    from skyfab.ui.table import table

    for path, text_of in results:
        if path == "-":
            put(sys.stdout, printable(text_of(trials)))
        elif path is not None:
            write(Path(path).expanduser(), text_of(trials), mode=0o644)
    if all(path != "-" for path, _ in results):
        table(*_table(trials), optional=("time", "host"))
    print(_summary(trials, run), file=sys.stderr)
    for trial in [trial for trial in trials if trial.state == "failed"][:1] or trials[:1]:
        what, end = ("log", "/log.txt") if trial.state == "failed" else ("folder", "")
        path = f"{trial.folder}{end}"
        get = f"skyfab get --run={run.id[:8]} {shlex.quote(path)}" if run.in_workdirs() else path
        print(HINTS.adapted(clean(f"the {what} of trial {trial.trial}: {get}", colour=False)), file=sys.stderr)
    for part in [part for part in run.parts if part.about.place and part.state == "failed"]:
        print(HINTS.adapted(f"{part.host}: its driver failed; to see why: skyfab attach {run.id[:8]}"), file=sys.stderr)
    if all(trial.state == "done" for trial in trials):
        return
    for host in _missing(run):
        why = "no response" if host in run.silent else "not asked"
        print(f"{host}: {why}, so trials may have run or ended there that are shown otherwise", file=sys.stderr)
    if run.state != "running" and not _missing(run):
        print("to run the trials that are not done, repeat the command with --resume", file=sys.stderr)


def _summary(trials: Sequence[Trial], run: Run) -> str:
    from skyfab.host.phase import without_times

    why = f"; GPU queue: {without_times(clean(run.phase.text, colour=False))}" if run.phase else ""
    return f"{counted(len(trials), 'trial')}: {_counts(trials)}{why}"


def _counts(trials: Sequence[Trial]) -> str:
    """How many are in each state."""
    return ", ".join(f"{count} {state}" for state, count in Counter(trial.state for trial in trials).items())


def _table(trials: Sequence[Trial]) -> tuple[list[str], list[list[str]]]:
    """Head and rows. Their content comes from hosts, and may be anything."""
    rows = []
    for trial in trials:
        values = {name: f"{one:.5g}" if type(one) is float else str(one)[:200] for name, one in trial.values.items()}
        time = "" if trial.seconds is None else str(timedelta(seconds=round(trial.seconds)))
        name = PurePosixPath(trial.folder).name
        rows.append(
            _with({"trial": name, "state": _state(trial), "host": trial.host, "time": time}, values, "reported")
        )
    head = [*dict.fromkeys(name for row in rows for name in row)] or ["trial"]
    return [clean(name, colour=False) for name in head], [
        [clean(row.get(name, ""), colour=False) for name in head] for row in rows
    ]


def _with(row: Mapping[str, Any], values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """A row with more columns; those whose names it already has get other names."""
    return {**row, **{f"{name} ({what})" if name in row else name: value for name, value in values.items()}}


def _state(trial: Trial) -> str:
    """
    >>> from skyfab.detached.sweep import Trial
    >>> _state(Trial(trial=1, state="failed", code=-9))
    'failed (SIGKILL)'
    """
    if trial.state != "failed":
        return trial.state
    code = next((one.name for one in Signals if one == -(trial.code or 0)), trial.code)
    return f"failed ({trial.error[:200] or code})"


def _csv(trials: Sequence[Trial]) -> str:
    """A row for each trial, with its arguments and what it has reported."""
    rows: list[dict[str, Any]] = []
    for trial in trials:
        given = dict(word.lstrip("-").partition("=")[::2] for word in trial.words)
        about = {name: getattr(trial, name) for name in ("trial", "state", "host", "seconds", "folder")}
        rows.append(_with(_with(about, given, "argument"), trial.values, "reported"))
    text = io.StringIO()
    writer = csv.DictWriter(text, [*dict.fromkeys(name for row in rows for name in row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _json(trials: Sequence[Trial]) -> str:
    return json.dumps([asdict(trial) for trial in trials], indent=2) + "\n"


Results = Sequence[tuple["str | None", Callable[[Sequence["Trial"]], str]]]
"""Files of results, and the functions that make their texts."""
