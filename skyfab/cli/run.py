"""`skyfab run`: runs a script, a function, a module or any other program on every rank, as torchrun would."""

from __future__ import annotations

import contextlib
import itertools
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

from skyfab._util.hints import HINTS
from skyfab._util.sizes import rate_of
from skyfab.cli.command import COMMAND, Detach, Option, Ranks, command
from skyfab.cli.run_options import GpuOptions, ScriptOptions
from skyfab.errors import BroadcastError, SkyfabError, UsageError

if TYPE_CHECKING:
    from skyfab.pool.compute import Compute
    from skyfab.pool.mirror import Mirror

_ENDS: Final = 15.0
"""Seconds in which ranks that were stopped should have ended."""


@command
def run(
    target: Annotated[
        str, Option("the script to run or the function to call; or -m MODULE, or -- COMMAND", "FILE.py[:function]")
    ],
    *arguments: Annotated[str, Option("its arguments", "[ARGS ...]", follows=True)],
    options: ScriptOptions,
    claim: GpuOptions,
    ranks: Ranks = None,
    sync: Annotated[
        bool | Literal["all"],
        Option(
            "first copy the script's folder, including data, to the hosts, except what .gitignore excludes",
            words={"all": "the same, including what .gitignore excludes"},
        ),
    ] = False,
    get: Annotated[Sequence[str], Option("fetch these files when the run has ended; repeatable", "PATTERN")] = (),
    mirror: Annotated[
        Sequence[str],
        Option("fetch new files of this folder during the run, into FOLDER; repeatable", "PATH[:FOLDER]"),
    ] = (),
    limit: Annotated[str | None, Option("use at most this many bytes per second for --mirror: 20MB/s", "RATE")] = None,
    detach: Detach = False,
    name: Annotated[str | None, Option("a name for the detached run", "NAME")] = None,
    with_plugin: Annotated[Sequence[str], Option("a plugin such as torch, jax or joblib; repeatable", "PLUGIN")] = (),
) -> None:
    """Run a script or any other program on every rank, as torchrun would.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so on: scripts written for torchrun need no change. Sends the
    modules that the script imports; --sync sends data too. Files that the script writes stay on the hosts, in the
    working folder (--workdir=temp: a temporary folder). --get fetches them, even after a failure or Ctrl-C; files that
    several hosts have go into a folder for each host. --mirror fetches them during the run; for a detached run, skyfab
    attach, logs and get --run do this. Without either, prints the command that fetches them. Without hosts and
    inventory, two ranks run on this machine, in the current folder. Exits with 1 if a rank fails.

    Installs the packages that the options name; otherwise those of the script's PEP 723 block, of pyproject.toml with
    uv.lock, or of requirements.txt; otherwise uses the hosts' own Python. --with adds to any of them. [tool.skyfab] in
    pyproject.toml sets defaults for the options. At a terminal, Ctrl-C asks whether to stop or detach the run.

    -m MODULE runs a module as python -m does. -- COMMAND runs any program: {rank}, {world_size}, {local_rank}, {node},
    {nodes}, {head} and {port} in its arguments are replaced; {{rank}} gives {rank}. It runs in the working folder:
    --sync copies the current folder there.

    --gpus takes GPUs that nobody uses, with or without skyfab, and starts a rank for each; if there are too few, it
    fails and says who uses them. --when-free waits for them instead; skyfab runs shows which run it waits for. With
    --detach, the run waits on the hosts, and this machine is not needed.

        skyfab run --hosts=node1,node2 train.py --epochs 3
        skyfab run --hosts=node1 --sync --get='ckpt/*' train.py
        skyfab run --hosts=node1 --mirror=ckpt:results --limit=20MB/s train.py
        skyfab run --hosts=gpu --pip=torch,numpy --env=HF_TOKEN train.py
        skyfab run --hosts=gpu --ranks=2 experiment.py:main
        skyfab run --hosts=gpu -m package.train --epochs 3
        skyfab run --hosts=gpu --when-free --gpus=4 --detach --name=night train.py
        skyfab run --hosts=gpu --ranks=1 --sync -- torchrun --nnodes={nodes} --node-rank={node} train.py
    """
    from skyfab._util.atomic import write
    from skyfab.calls.call import as_function
    from skyfab.calls.project import SENT
    from skyfab.calls.script import perform
    from skyfab.cli.detach import broadcast, tell_how_to_attach
    from skyfab.cli.put import remember, start_mirrors
    from skyfab.cli.run_environment import plugins_of, pool_of, project_of
    from skyfab.detached.run import Run
    from skyfab.host.command import execute
    from skyfab.plugins.base import OwnPort, Torchrun
    from skyfab.pool.workdir import last_run

    script, function = parsed(target, arguments, options.hosts)
    if limit is not None and not mirror:
        raise UsageError("--limit is for --mirror", hint="add --mirror=FOLDER")
    if limit is not None and rate_of(limit) is None:
        raise UsageError(f"invalid --limit={limit}: expected a rate such as 20MB/s")
    label = shlex.join(arguments) if target == COMMAND else target.replace("-m ", "python -m ")
    settings = project_of(options, script)
    if script.is_file():
        _note_options(script, arguments)
    plugins = [Torchrun(), *([OwnPort()] if claim.claims else []), *plugins_of(with_plugin or settings.plugins)]
    ranks = ranks or claim.gpus or settings.ranks
    with pool_of(claim.added_to(options), script, settings, ranks=ranks, here=2, plugins=plugins) as compute:
        with contextlib.suppress(OSError):
            write(last_run(), next(reversed(SENT), ""))  # for `skyfab ssh` and `exec`
        started = as_function(execute if target == COMMAND else perform)
        started.label = label
        folder = lay_out(compute, script.parent, ignored=sync == "all") if sync else None
        words = list(arguments)
        named = script.name.removeprefix("-m ")
        call = started(words, folder) if target == COMMAND else started(named, function, words, folder)
        if claim.claims:
            call = claim.supervised(call, compute, name or label)
        mirrors = [] if detach else start_mirrors(compute, mirror, limit, Path())
        try:
            run = compute.launch(call, name=name) if detach else broadcast(compute, call, name=name or label)
        except (BroadcastError, BrokenPipeError, KeyboardInterrupt) as error:
            _save(compute, get, mirrors, error)
            raise
        if not isinstance(run, Run):
            _bring_back(compute, get, mirrors)
    if isinstance(run, Run):
        if get or mirror:
            remember(run, get, mirror, limit)
        tell_how_to_attach(run, name, get, options.container)
        if mirror:
            text = f"skyfab attach, logs and get --run fetch new files in {', '.join(mirror)}"
            print(HINTS.adapted(text), file=sys.stderr)


def _note_options(script: Path, arguments: Sequence[str]) -> None:
    """Says which options of this command follow the script, unless that has an option of the same name."""
    own = {one.flags[-1] for one in run.parameters if not one.positional}
    text = script.read_text(encoding="utf-8", errors="replace").replace("_", "-")
    passed = [word for word in arguments if (flag := word.partition("=")[0]) in own and flag[2:] not in text]
    if passed:
        what = f"note: {shlex.join(passed)} is passed to {script.name}"
        print(f"{what}; options of skyfab go before the file", file=sys.stderr)


def lay_out(compute: Compute, folder: Path, *, ignored: bool = False) -> str:
    """Copies a folder to the hosts, and says so. Returns its place in the working folders."""
    name, reports = compute.files.lay_out(folder, compute.hosts, ignored=ignored)
    for report in reports:
        print(report, file=sys.stderr)
    return name


def _save(compute: Compute, patterns: Sequence[str], mirrors: Sequence[Mirror], error: BaseException) -> None:
    """Fetches files of a run that failed or was interrupted, which stays the command's error. Ctrl-C ends it."""
    from skyfab.cli.put import tell_not_fetched

    try:
        if (patterns or mirrors) and not isinstance(error, BroadcastError):
            what = "interrupted" if isinstance(error, KeyboardInterrupt) else "the output is no longer read"
            print(f"{what}: stopping, then fetching files; Ctrl-C again to skip fetching", file=sys.stderr)
            compute.wait_for_ranks(_ENDS)
        _bring_back(compute, patterns, mirrors)
    except (SkyfabError, OSError) as trouble:
        tell_not_fetched(trouble)  # the cause follows
    finally:
        for mirror in mirrors:
            mirror.leave()


def _bring_back(compute: Compute, patterns: Sequence[str], mirrors: Sequence[Mirror]) -> None:
    """Fetches files that the run has written."""
    from skyfab.cli.put import stop_mirrors

    stop_mirrors(mirrors)
    if patterns and not all(node.workdir.callers for node in compute.hosts):
        for report in compute.download(patterns):
            if report.entries:  # hosts without any are reported already
                print(report, file=sys.stderr)


def parsed(target: str, arguments: Sequence[str] = (), hosts: str | None = None, task: str = "run") -> tuple[Path, str]:
    """The script and the name of the function; for a module and a command, as `Image.program` has them."""
    from skyfab._util.suggest import similar_path
    from skyfab.cli.put import file_errors
    from skyfab.detached.written import required_folder

    here = required_folder()
    if target == COMMAND:
        if not arguments:
            raise UsageError("no command to run", hint=f"put it after --: skyfab {task} -- COMMAND")
        modules = [word for before, word in itertools.pairwise(arguments) if before == "-m"]
        return here / f"-m {' '.join(filter(_is_module, modules))}", ""
    if target.startswith("-m "):
        if not _is_module(target.removeprefix("-m ")):
            raise UsageError(f"not the name of a module: {target[3:]}", hint="skyfab run -m package.module")
        _check_module(target.removeprefix("-m "))
        return here / target, ""
    name, colon, function = target.partition(":")
    script = Path(name).expanduser()
    with file_errors():
        is_file = script.is_file()
    if not is_file:
        why = "not a file" if script.is_dir() else "no such file"
        hint = similar_path(script, ".py") or f"skyfab {task} --help"
        if arguments and arguments[0].partition(":")[0].endswith(".py"):
            named = f"{hosts},{name}" if hosts else name
            hint = f"to name hosts: skyfab run --hosts={shlex.join([named, *arguments])}"
        if shutil.which(name) or (hint == "skyfab run --help" and script.suffix != ".py"):
            typed = HINTS.words if target in HINTS.words else [target, *arguments]
            at = typed.index(target)
            hint = f"to run a program: skyfab run {shlex.join([*typed[:at], '--', *typed[at:]])}"
        raise UsageError(f"{why}: {name}", hint=hint)
    if script.suffix != ".py":
        raise UsageError(f"not a Python file (.py): {name}", hint="to run other programs: skyfab run -- COMMAND")
    if colon and not function.isidentifier():
        raise UsageError(f"not a function name: {function!r}", hint=f"skyfab run {shlex.quote(f'{name}:main')}")
    if function:
        _check_function(script, name, function)
    return script.resolve(), function


def _is_module(name: str) -> bool:
    return all(map(str.isidentifier, name.split(".")))


def _check_module(name: str) -> None:
    """Raises UsageError if it would be in a package of the current folder, and is not. Hosts may have other modules."""
    *packages, last = name.split(".")
    folder = Path.cwd().joinpath(*packages)
    is_here = bool(packages) and (Path.cwd() / packages[0] / "__init__.py").is_file()
    if is_here and not (folder / last).is_dir() and not any(folder.glob(f"{last}.*")):
        raise UsageError(f"no module {name} on this machine", hint=f"looked in {folder}")


def _check_function(script: Path, name: str, function: str) -> None:
    """Raises UsageError if the file cannot have this function: its name does not occur there."""
    from skyfab._util.suggest import did_you_mean

    text = script.read_text(encoding="utf-8", errors="replace")
    if not re.search(rf"\b{function}\b|import \*|__getattr__|globals\(", text):
        defined = re.findall(r"^(?:async +)?def +(\w+)", text, re.MULTILINE)
        hint = did_you_mean(f"{name}:{function}", [f"{name}:{one}" for one in defined])
        raise UsageError(f"{name} has no function {function}", hint=hint)
