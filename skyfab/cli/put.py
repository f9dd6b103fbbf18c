"""`skyfab put` and `skyfab get`: copy files and folders to hosts and back."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from skyfab._util.atomic import write
from skyfab._util.cache import cache_folder
from skyfab.cli import report
from skyfab.cli.command import InventoryFile, NamedHosts, Option, command
from skyfab.errors import HostError, PoolError, SkyfabError, UsageError

if TYPE_CHECKING:
    from skyfab.detached.run import Run
    from skyfab.files.transfer import Report
    from skyfab.inventory.host import Host
    from skyfab.inventory.inventory import Inventory
    from skyfab.pool.compute import Compute
    from skyfab.pool.mirror import Mirror

Folders: TypeAlias = "Mapping[str, Sequence[str]]"
"""What to fetch from one host only, by its name."""


@command
def put(
    path: Annotated[str, Option("a file or folder on this machine", "PATH")],
    hosts: NamedHosts = None,
    inventory: InventoryFile = None,
    to: Annotated[
        str | None, Option("the path on the hosts; with a slash at the end, the folder to put it into", "PATH")
    ] = None,
) -> None:
    """Copy a file or folder to every host.

    Relative paths on the hosts refer to the working folder, which programs that you start in the current folder also
    use. Without --to, the path is the same as on this machine. Skips files that the hosts already have with the same
    content, and resumes interrupted transfers.

        skyfab put data --hosts=gpu
        skyfab put model.pt --hosts=node1 --to=/scratch/models/
    """
    from skyfab._util.suggest import similar_path
    from skyfab.cli.host_selection import selected
    from skyfab.detached.written import required_folder
    from skyfab.pool.files import local_path

    required_folder()
    local = local_path(path)
    with file_errors():
        is_there = local.exists()
    if not is_there:
        if local.is_symlink():
            raise UsageError(f"broken link: {path} points to {local.readlink()}")
        raise UsageError(f"no such file or folder: {path}", hint=similar_path(local))
    with file_pool(*selected(hosts, inventory)) as compute:
        _tell(compute.upload(path, to=to))


@command
def get(
    path: Annotated[Sequence[str], Option("files, folders or patterns on the hosts", "PATH", plain=True)] = (),
    hosts: NamedHosts = None,
    inventory: InventoryFile = None,
    to: Annotated[str, Option("the folder on this machine to put them into", "FOLDER")] = ".",
    run: Annotated[str | None, Option("fetch from the folder of this detached run: its ID or its name", "RUN")] = None,
) -> int:
    """Copy files and folders from hosts.

    Relative paths refer to the working folder on the hosts, and are kept below the folder on this machine; quote
    patterns. --run without a path fetches what the run wrote, once it has ended. From several hosts, files that more
    than one of them has go into a folder for each host. Skips files that this machine already has with the same
    content, and resumes interrupted transfers. If a host does not respond, fetches from the others and exits with 3.

        skyfab get 'ckpt/*' --hosts=node1
        skyfab get /var/log/syslog --hosts=gpu --to=logs
        skyfab get --run=night --to=results
    """
    from skyfab.cli.host_selection import selected
    from skyfab.detached.find import attached
    from skyfab.detached.written import required_folder

    required_folder()
    if run:
        with attached(run, hosts, inventory=inventory, results="data") as found:
            with mirrored(found) as is_mirrored:
                pass
            own: Folders = {}
            if not path:
                path, own = _written_by(found)
        known, chosen, silent = found.inventory, tuple(found.in_workdirs()), found.silent
        if is_mirrored and not path and not own:
            return 3 if silent else 0
        if not (path or own) or not chosen:
            hint = "skyfab get --help"
            if not chosen:
                why = "has no folder on other machines"
            elif found.has_ended and found.state != "lost":
                why = "wrote no files on its hosts"
            else:
                why = "has no list of its files" if found.state == "lost" else "lists no files before it has ended"
                hint = f"name them: skyfab get --run={shlex.quote(run)} PATH"
            raise UsageError(f"run {run} ({found.state}) {why}", hint=hint)
    elif not path:
        raise UsageError("expected a path, or --run", hint="skyfab get --help")
    else:
        known, chosen, silent, own = *selected(hosts, inventory), [], {}
    code = _fetch(known, chosen, path, to, own)
    for host in silent:
        print(f"{host}: no response, so nothing was fetched from it", file=sys.stderr)
    return 3 if silent else code


def _written_by(run: Run) -> tuple[list[str], Folders]:
    """What its hosts list once it has ended, and of a sweep the folders of all trials, also of those that it resumed.

    The folder of a trial is fetched from the host that ran it last: others may still have an earlier attempt.
    """
    from skyfab.detached.sweep import LABEL, Sweep

    def is_in(path: str, folders: Iterable[str]) -> bool:
        return any(folder == "." or f"{path}/".startswith(f"{folder}/") for folder in folders)

    listed = {path for part in run.parts for one in part.files for path in one.paths}
    trials = Sweep(run).look() if run.function.startswith(LABEL) and run.has_ended else []
    trials = [trial for trial in trials if trial.state not in ("waiting", "not started")]  # these have no folder yet
    folders = {trial.folder for trial in trials if trial.folder}
    outside = {path for path in listed if not is_in(path, folders)}
    everywhere = sorted(outside)
    own: dict[str, list[str]] = {part.host: [] for part in run.parts}
    for trial in trials:
        if trial.folder and not is_in(trial.folder, outside):
            own.get(trial.host, everywhere).append(trial.folder)
    return everywhere, {host: paths for host, paths in own.items() if paths}


def _fetch(inventory: Inventory, hosts: Sequence[Host], paths: Sequence[str], to: str, own: Folders) -> int:
    """Fetches from the hosts that respond, and prints the errors of the others. Raises the error if none responds."""
    try:
        with file_pool(inventory, hosts) as compute:
            if paths:
                _tell(compute.download(paths, to=to))
            for host in hosts:
                if host.name in own:
                    _tell(compute.download(own[host.name], to=to, on=host.name))
        return 0
    except (HostError, PoolError) as error:
        failed = [one for one in getattr(error, "exceptions", [error]) if isinstance(one, HostError)]
        rest = [host for host in hosts if host.name not in {one.host for one in failed}]
        if not rest or not failed:
            raise
        report.print_errors(failed)
        _fetch(inventory, rest, paths, to, own)
        return 3


def remember(run: Run, patterns: Sequence[str], mirror: Sequence[str], limit: str | None) -> None:
    """Records on this machine what to fetch, and where to: a host must not choose what is written where."""
    noted = {"patterns": list(patterns), "to": str(Path.cwd()), "mirror": list(mirror), "limit": limit}
    write(_note_of(run), json.dumps(noted))


def fetch_remembered(run: Run) -> bool:
    """Fetches what `run --detach --get` named, into the folder where the command was typed. Prints errors.

    Returns whether anything was named, also with --mirror.
    """
    hosts, noted = run.in_workdirs(), _noted(run)
    if not hosts or not noted:
        return False
    try:
        if noted["patterns"]:
            _fetch(run.inventory, hosts, noted["patterns"], noted["to"], {})
    except SkyfabError as error:
        tell_not_fetched(error)
    return True


@contextmanager
def mirrored(run: Run) -> Iterator[bool]:
    """During the block, mirrors what `run --detach --mirror` named, into the folder where the command was typed.

    Yields whether anything was named. Prints errors.
    """
    hosts, noted = run.in_workdirs(), _noted(run)
    is_named = bool(hosts and noted.get("mirror"))
    mirrors: list[Mirror] = []
    with ExitStack() as opened:
        try:
            if is_named:
                compute = opened.enter_context(file_pool(run.inventory, hosts))
                mirrors = start_mirrors(compute, noted["mirror"], noted["limit"], Path(noted["to"]))
        except (SkyfabError, OSError) as error:
            tell_not_fetched(error)
        for mirror in mirrors:
            opened.callback(mirror.leave)  # after Ctrl-C
        yield is_named
        stop_mirrors(mirrors)


def start_mirrors(compute: Compute, named: Sequence[str], limit: str | None, base: Path) -> list[Mirror]:
    """Starts the mirrors that the values of --mirror name: one for each folder on this machine."""
    paths: dict[Path, list[str]] = {}
    for word in named:
        path, _, folder = word.partition(":")
        paths.setdefault(base / Path(folder).expanduser(), []).append(path)
    return [compute.mirror(some, to=folder, on="all", limit=limit) for folder, some in paths.items()]


def stop_mirrors(mirrors: Sequence[Mirror]) -> None:
    """Runs the final pass of each mirror, and prints what was fetched."""
    for mirror in mirrors:
        mirror.close()
        for one in mirror.reports:
            if one.sent:
                print(one, file=sys.stderr)


def tell_not_fetched(error: Exception) -> None:
    print(f"not fetched: {report.text(error).removeprefix('error: ')}", file=sys.stderr)


def _noted(run: Run) -> dict[str, Any]:
    """What `remember` recorded; empty if nothing."""
    path = _note_of(run)
    noted: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return noted


def _note_of(run: Run) -> Path:
    return cache_folder() / "fetch" / f"{run.id}.json"


@contextmanager
def file_pool(inventory: Inventory, hosts: Sequence[Host]) -> Iterator[Compute]:
    """A pool that sends no modules to hosts. Errors of files on this machine become messages, like those of hosts."""
    from skyfab.calls.image import Image
    from skyfab.pool.compute import Compute

    with file_errors(), Compute(hosts, inventory=inventory, image=Image(excludes=("*",))) as compute:
        for node in compute.hosts:
            node.owner = ""  # the project's folder, even while a run uses it
        yield compute


@contextmanager
def file_errors() -> Iterator[None]:
    """Errors of files on this machine become messages."""
    from skyfab.files.entries import words
    from skyfab.ui.terminal import unwritten

    try:
        yield
    except OSError as error:
        if isinstance(error, (SkyfabError, BrokenPipeError)) or error in unwritten:
            raise
        raise SkyfabError(words(error)) from error


def _tell(reports: Sequence[Report]) -> None:
    from skyfab.ui.terminal import clean, put

    for one in reports:
        if one.entries or not one.folder:  # hosts without a file to fetch are reported already
            put(sys.stdout, f"{clean(str(one))}\n")
