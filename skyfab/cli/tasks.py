"""All commands of `skyfab`, and its program.

``skyfab TASK``, ``invoke TASK`` and ``./inv TASK`` run the same commands; each is declared in a module of `skyfab.cli`.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Final

from skyfab import __version__
from skyfab.cli import report, verbose
from skyfab.cli.command import Command, Exit, discard_output, flush_output
from skyfab.cli.completion import completion_of
from skyfab.cli.doctor import doctor
from skyfab.cli.exec import exec_
from skyfab.cli.forward import forward
from skyfab.cli.gc import gc
from skyfab.cli.hosts import hosts
from skyfab.cli.init import init
from skyfab.cli.lab import down, status, up
from skyfab.cli.parser import CommandLine
from skyfab.cli.prepare import prepare
from skyfab.cli.put import get, put
from skyfab.cli.run import run
from skyfab.cli.runs import attach, logs, runs, stop
from skyfab.cli.sigterm import SIGTERM
from skyfab.cli.ssh import ssh
from skyfab.cli.stacks import stacks
from skyfab.cli.top import top
from skyfab.cli.train import train
from skyfab.cli.trust import trust
from skyfab.errors import UsageError
from skyfab.ui.hints import HINTS

COMMANDS: Final[Mapping[str, Command]] = {
    **{
        command.name: command
        for command in (
            *(train, run, runs, logs, attach, stop),
            *(init, hosts, top, doctor, stacks, exec_, ssh, forward, put, get),
            *(trust, prepare, gc, completion_of(lambda: COMMANDS)),
        )
    },
    **{f"lab.{command.name}": command for command in (up, down, status)},
}
"""By name, in the order in which new users need them."""


def main(argv: Sequence[str] | None = None, commands: Mapping[str, Command] = COMMANDS) -> None:
    """Runs the `skyfab` program; with other commands, that of a project."""
    HINTS.program, words = ("skyfab", sys.argv[1:]) if argv is None else (argv[0], list(argv[1:]))
    if sys.stderr is None:  # closed: messages would go to stdout
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    try:
        with SIGTERM.as_interrupt():
            _run(words, commands)
    except Exit as end:
        if end.message:
            with suppress(OSError):
                print(end.message, file=sys.stderr)
        sys.exit(end.code)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EBADF):
            raise
        discard_output()
        sys.exit(1 if error.errno == errno.EPIPE else f"error: standard output: {error.strerror}")
    finally:
        flush_output()


def _run(words: list[str], commands: Mapping[str, Command]) -> None:
    if sys.stdout is None:
        raise Exit("error: standard output is closed\nhint: to discard what is printed, append >/dev/null", code=1)
    try:
        line = CommandLine(commands).parse(words)
    except UsageError as error:
        raise Exit(report.text(error), code=error.exit_code) from None
    if not line.command:
        print(f"skyfab {__version__}")
        return
    with verbose.shown() if line.verbose else nullcontext():
        commands[line.command].perform(line.values, line.rest)
