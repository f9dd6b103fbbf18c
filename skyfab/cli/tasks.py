"""The list of all commands of `skyfab`, and its main function.

``skyfab``, ``invoke`` and ``./inv`` run the same commands; each is declared in a module of `skyfab.cli`.
"""

from __future__ import annotations

import errno
import gc
import importlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final

from skyfab import __version__
from skyfab._util.hints import HINTS
from skyfab.cli import report
from skyfab.cli.command import Command, Exit, flush_output
from skyfab.cli.parser import CommandLine
from skyfab.cli.sigterm import SIGTERM
from skyfab.errors import UsageError
from skyfab.ui.terminal import clean, unwritten

_NAMES: Final = (
    *("train", "run", "sweep", "serve", "runs", "logs", "attach", "stop", "init", "hosts", "top", "doctor", "stacks"),
    *("exec", "ssh", "forward", "put", "get", "fetch", "trust", "prepare", "gc", "completion"),
    *("lab.up", "lab.down", "lab.status"),
)
"""The commands, in the order in which new users need them."""
_MODULES: Final = {"logs": "runs", "attach": "runs", "stop": "runs", "get": "put"}
"""Where the module does not have the command's own name, or the part of it before the dot."""


class _Commands(Mapping[str, Command]):
    """Imports a command when it is looked up: a program runs one of them."""

    def __getitem__(self, name: str) -> Command:
        if name not in _NAMES:
            raise KeyError(name)
        module = importlib.import_module(f"skyfab.cli.{_MODULES.get(name, name.partition('.')[0])}")
        return next(one for one in vars(module).values() if isinstance(one, Command) and one.name == name)

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)


COMMANDS: Final[Mapping[str, Command]] = _Commands()
"""All commands, by name."""
HINTS.takes_inventory = lambda name: name in COMMANDS and COMMANDS[name].takes_inventory


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
        unwritten.append(error)
    finally:
        flush_output()
        gc.freeze()  # Python would examine every object again, for longer than most commands compute


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
    with _steps() if line.verbose else nullcontext():
        commands[line.command].perform(line.values, line.rest)


class _Steps(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{record.relativeCreated / 1000:6.1f} s  {clean(record.getMessage(), colour=False)}"


@contextmanager
def _steps() -> Iterator[None]:
    """Prints the steps that the library logs, with the seconds since the start, and all frames of tracebacks."""
    trace = os.environ.get("SKYFAB_TRACE", "")
    os.environ["SKYFAB_TRACE"] = "1"
    logger, steps = logging.getLogger("skyfab"), logging.StreamHandler()
    steps.setFormatter(_Steps())
    before = logger.level
    logger.addHandler(steps)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(steps)
        os.environ["SKYFAB_TRACE"] = trace
