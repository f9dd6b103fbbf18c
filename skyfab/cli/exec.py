"""`skyfab exec`: runs a shell command on every host."""

from __future__ import annotations

import functools
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from skyfab._util.hints import HINTS
from skyfab.cli import report
from skyfab.cli.command import Hosts, InventoryFile, Option, Workdir, command
from skyfab.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skyfab.inventory.host import Host
    from skyfab.session.question import Reply
    from skyfab.ui.events import Events


@command
def exec_(
    *words: Annotated[str, Option("the shell command", "-- COMMAND")],
    hosts: Hosts = None,
    inventory: InventoryFile = None,
    workdir: Workdir = "auto",
    no_env: Annotated[bool, Option("do not use the project's environment, modules, setup lines and variables")] = False,
) -> int:
    """Run a shell command on every host.

    Runs it with /bin/sh in the working folder, where run and put keep the files of the current folder; on this machine,
    in the current folder. Uses this project's environment, modules, setup lines and variables, as skyfab ssh does. As
    with ssh, the words after -- are joined with spaces: quote what the remote shell should see. Exits with 1 if the
    command fails on a host.

        skyfab exec -- uptime
        skyfab exec node1 node2 -- ls -l ckpt
        skyfab exec --workdir='~' -- du -sh .cache
        skyfab exec --hosts=gpu -- 'nvidia-smi -L | wc -l'
    """
    from skyfab._util.scripts import given
    from skyfab.cli.host_selection import asking, selected
    from skyfab.cli.ssh import of_project
    from skyfab.detached.written import current_folder
    from skyfab.pool.workdir import Workdirs, last_run
    from skyfab.session.question import Question

    line = " ".join(words)
    if not line.strip():
        raise UsageError("no command to run", hint=f"put it after --: skyfab exec {_meant(hosts, inventory)}")
    found, chosen = selected(hosts, inventory)
    folders = Workdirs(workdir)
    here = Path(current_folder())
    files = [folder / name for folder in (here, *here.parents) for name in ("pyproject.toml", "requirements.txt")]
    is_project = not no_env and any(map(Path.is_file, [last_run(), *files]))  # the rest would take imports
    shells = {host.name: of_project(host, line) for host in chosen} if is_project else {}
    chosen = tuple(replace(host, setup=shells[host.name].setup) if host.name in shells else host for host in chosen)
    codes = {0}
    with asking(chosen, found, show=True) as asker:

        def run(host: Host) -> int:
            arguments = {"line": line, "workdir": folders.of(host).sent, "variables": dict(host.env)}
            if shell := shells.get(host.name):
                own = "shell=/bin/sh " + given(missing=shell.otherwise)
                script = own + replace(shell, folder="", setup="", otherwise="").script()
                arguments |= {"line": script, "variables": dict(shell.variables)}
            show = functools.partial(_show, asker.events)
            return asker.ask_one(Question("command", show, arguments), host)

        outcomes = asker.each(run)
    for outcome in outcomes:
        if outcome.error is not None:
            print(report.text(outcome.error), file=sys.stderr)
            codes.add(report.exit_code(outcome.error))
        elif outcome.answer:
            ended = f"exit code {outcome.answer}" if outcome.answer > 0 else f"killed by signal {-outcome.answer}"
            print(f"{outcome.host.name}: {ended}", file=sys.stderr)
            codes.add(1)
    return max(codes)


def _meant(hosts: str | None, inventory: str | None) -> str:
    """The words of the user, with ``--`` before what seems to be the command."""
    from skyfab.inventory.host import LOCAL
    from skyfab.inventory.inventory import Inventory

    if hosts is None:
        return "-- uptime"
    if "," in hosts:
        return hosts.replace(",", " -- ", 1).replace(",", " ")
    known = Inventory.of(inventory)
    is_host = hosts in ("all", LOCAL.name, *known.hosts, *known.groups) or hosts not in HINTS.words
    return f"{shlex.join(HINTS.words)} -- uptime" if is_host else f"-- {hosts}"


def _show(events: Events, host: Host, replies: Iterator[Reply]) -> int:
    """Shows what a command writes, line by line; returns its exit code."""
    from skyfab.session.lines import Lines
    from skyfab.ui.events import Output

    streams = {"stdout": Lines("stdout"), "stderr": Lines("stderr")}

    def emit(lines: Lines | None) -> None:
        for text, end in lines or ():
            events.emit(Output(host=host.name, rank=None, stream=lines.stream, text=text, end=end))  # type: ignore[union-attr]

    code = None
    for reply in replies:
        if reply.value in streams:
            emit(streams[reply.value].feed(reply.data))
        else:
            code = reply.value
    for stream in streams.values():
        emit(stream.rest() if stream.partial else None)
    if type(code) is not int:
        raise ValueError("no exit code")
    return code
