"""`skyfab run`: runs a script, or a function of one, on every rank, as torchrun would."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

from skyfab.cli.command import Detach, Option, Ranks, command
from skyfab.cli.script_options import ScriptOptions
from skyfab.errors import BroadcastError, SkyfabError, UsageError

if TYPE_CHECKING:
    from skyfab.pool.compute import Compute

_ENDS: Final = 15.0
"""Seconds in which ranks that were stopped should have ended."""


@command
def run(
    target: Annotated[str, Option("the script to run, or the function to call", "FILE.py[:function]")],
    *arguments: Annotated[str, Option("the arguments of the script or function", "[ARGS ...]", follows=True)],
    options: ScriptOptions,
    ranks: Ranks = None,
    sync: Annotated[
        bool | Literal["all"],
        Option(
            "first copy the script's folder, including data, to the hosts, except what .gitignore excludes",
            words={"all": "the same, including what .gitignore excludes"},
        ),
    ] = False,
    get: Annotated[Sequence[str], Option("fetch these files when the run has ended; repeatable", "PATTERN")] = (),
    detach: Detach = False,
    name: Annotated[str | None, Option("a name for the detached run", "NAME")] = None,
    with_plugin: Annotated[Sequence[str], Option("a plugin such as torch, jax or joblib; repeatable", "PLUGIN")] = (),
) -> None:
    """Run a script on every rank, as torchrun would.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so on: scripts written for torchrun need no change. Sends the
    modules that the script imports; --sync sends data too. Files that the script writes stay on the hosts, in the
    working folder (--workdir=temp: a temporary folder). --get fetches them, even after a failure or Ctrl-C;
    files that several hosts have, into a folder for each host. Without --get, prints the command to fetch them. Without
    hosts and inventory, two ranks run on this machine, in the current folder. Exits with 1 if a rank fails.

    Installs the packages that the options name; otherwise those of the script's PEP 723 block, of pyproject.toml with
    uv.lock, or of requirements.txt; otherwise uses the hosts' own Python. --with adds to any of them. [tool.skyfab] in
    pyproject.toml sets defaults for the options. At a terminal, Ctrl-C asks whether to stop or detach the run.

        skyfab run --hosts=node1,node2 train.py --epochs 3
        skyfab run --hosts=node1 --sync --get='ckpt/*' train.py
        skyfab run --hosts=gpu --pip=torch,numpy --env=HF_TOKEN train.py
        skyfab run --hosts=gpu --ranks=2 experiment.py:main
    """
    from skyfab._util.atomic import write
    from skyfab.calls.call import as_function
    from skyfab.calls.project import SENT
    from skyfab.calls.script import perform
    from skyfab.cli.detach import broadcast, tell_how_to_attach
    from skyfab.cli.interpreter import hand_over
    from skyfab.cli.project_settings import ProjectSettings
    from skyfab.cli.put import remember
    from skyfab.cli.run_environment import plugins_of
    from skyfab.detached.run import Run
    from skyfab.plugins.base import Torchrun
    from skyfab.pool.workdir import last_run

    script, function = _parsed(target, arguments, options.hosts)
    if not options.no_project:
        hand_over(script)
    settings = ProjectSettings.of(script)
    plugins = [Torchrun(), *plugins_of(with_plugin or settings.plugins)]
    with options.pool(script, settings, ranks=ranks or settings.ranks, here=2, plugins=plugins) as compute:
        with contextlib.suppress(OSError):
            write(last_run(), next(reversed(SENT), ""))  # for `skyfab ssh` and `exec`
        started = as_function(perform)
        started.label = target
        folder = None
        if sync:
            folder, reports = compute.files.lay_out(script.parent, compute.hosts, ignored=sync == "all")
            for report in reports:
                print(report, file=sys.stderr)
        call = started(script.name, function, list(arguments), folder)
        try:
            run = compute.launch(call, name=name) if detach else broadcast(compute, call, name=name or target)
        except (BroadcastError, KeyboardInterrupt) as error:
            _save(compute, get, error)
            raise
        if not isinstance(run, Run):
            _bring_back(compute, get)
    if isinstance(run, Run):
        if get:
            remember(run, get)
        tell_how_to_attach(run, name, get, options.container)


def _save(compute: Compute, patterns: Sequence[str], error: BaseException) -> None:
    """Fetches files of a run that failed or was interrupted, which stays the command's error. Ctrl-C ends it."""
    from skyfab.cli import report

    if patterns and isinstance(error, KeyboardInterrupt):
        print("interrupted: stopping, then fetching files; Ctrl-C again to skip fetching", file=sys.stderr)
        compute.wait_for_ranks(_ENDS)
    try:
        _bring_back(compute, patterns)
    except (SkyfabError, OSError) as trouble:
        print(f"not fetched: {report.text(trouble).removeprefix('error: ')}", file=sys.stderr)  # the cause follows


def _bring_back(compute: Compute, patterns: Sequence[str]) -> None:
    """Fetches files that the run has written."""
    if patterns and not all(node.workdir.callers for node in compute.hosts):
        for report in compute.download(patterns):
            if report.entries:  # hosts without any are reported already
                print(report, file=sys.stderr)


def _parsed(target: str, arguments: Sequence[str] = (), hosts: str | None = None) -> tuple[Path, str]:
    from skyfab._util.suggest import similar_path

    name, colon, function = target.partition(":")
    script = Path(name).expanduser()
    if not script.is_file():
        why = "not a file" if script.is_dir() else "no such file"
        hint = similar_path(script, ".py") or "skyfab run --help"
        if arguments and arguments[0].partition(":")[0].endswith(".py"):
            named = f"{hosts},{name}" if hosts else name
            hint = f"to name hosts: skyfab run --hosts={shlex.join([named, *arguments])}"
        raise UsageError(f"{why}: {name}", hint=hint)
    if script.suffix != ".py":
        raise UsageError(f"not a Python file (.py): {name}", hint="to run other commands: skyfab exec")
    if colon and not function.isidentifier():
        raise UsageError(f"not a function name: {function!r}", hint=f"skyfab run {shlex.quote(f'{name}:main')}")
    if function:
        _check_function(script, name, function)
    return script.resolve(), function


def _check_function(script: Path, name: str, function: str) -> None:
    """Raises UsageError if the file cannot have this function: its name does not occur there."""
    from skyfab._util.suggest import did_you_mean

    text = script.read_text(encoding="utf-8", errors="replace")
    if not re.search(rf"\b{function}\b|import \*|__getattr__|globals\(", text):
        defined = re.findall(r"^(?:async +)?def +(\w+)", text, re.MULTILINE)
        hint = did_you_mean(f"{name}:{function}", [f"{name}:{one}" for one in defined])
        raise UsageError(f"{name} has no function {function}", hint=hint)
