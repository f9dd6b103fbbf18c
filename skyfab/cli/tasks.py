"""All tasks of the `skyfab` command, as an invoke collection that users can add to their own tasks.py, and its program.

``skyfab TASK``, ``invoke TASK`` and ``./inv TASK`` run the same tasks; each is declared in a module of `skyfab.cli`.
"""

from __future__ import annotations

import errno
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence

from invoke import Collection, Exit, ParseError, Program

from skyfab import __version__
from skyfab.cli.command import Command, discard_output, flush_output
from skyfab.cli.exec import exec_
from skyfab.cli.gc import gc
from skyfab.cli.hosts import hosts
from skyfab.cli.lab import down, status, up
from skyfab.cli.prepare import prepare
from skyfab.cli.put import get, put
from skyfab.cli.run import run
from skyfab.cli.runs import attach, logs, runs, stop
from skyfab.cli.sigterm import SIGTERM
from skyfab.cli.stacks import stacks
from skyfab.cli.train import train
from skyfab.cli.trust import trust

namespace = Collection(
    *(train, run, runs, logs, attach, stop),
    *(hosts, stacks, exec_, put, get, trust, prepare, gc),
    Collection("lab", up, down, status),
)
"""All tasks of skyfab. To use them in your own tasks.py: ``from skyfab.cli import namespace``."""


class _Skyfab(Program):
    """invoke's program with skyfab's exit codes, and a help that begins with the tasks."""

    def parse_core_args(self) -> None:
        super().parse_core_args()
        words = self.core.unparsed
        if {"-h", "--help"}.intersection(words[1:]):  # also where the task still needs a word
            self.core[0].args.help.value, self.core.unparsed = words[0], []

    def parse_tasks(self) -> None:
        self._or_usage(super().parse_tasks)

    def parse_cleanup(self) -> None:
        self._or_usage(super().parse_cleanup)

    def _or_usage(self, step: Callable[[], None]) -> None:
        try:
            step()
        except ParseError as error:
            raise Exit(f"error: {error}\nhint: {self._hint(str(error))}", code=2) from None

    def _hint(self, error: str) -> str:
        from skyfab.inventory.host import did_you_mean

        name = next((word for word in self.core.unparsed if word in self.parser.contexts), None)
        task = None if name is None else self.collection[name]
        if isinstance(task, Command) and "required positional" in error:
            return f"{self.binary} {name} {task.usage}"
        known = self.parser.contexts if name is None else self.parser.contexts[name].flags
        unknown = re.fullmatch("No idea what '(.*)' is!", error)
        near = did_you_mean(unknown[1], known) if unknown else None
        return near or " ".join([self.binary, *([name] if name else []), "--help"])

    def task_list_opener(self, extra: str = "") -> str:
        return "Tasks"

    def print_help(self) -> None:
        print(f"Usage: {self.binary} TASK [--options]\n")
        self.list_tasks()
        print(f"{self.binary} TASK --help tells more about one of them.")

    def print_task_help(self, name: str) -> None:
        task = self.collection[name]
        if not isinstance(task, Command):
            super().print_task_help(name)
            return
        print(f"Usage: {self.binary} {name} {task.usage}".rstrip() + "\n")
        for paragraph in (inspect.getdoc(task) or "").split("\n\n"):
            is_example = paragraph.startswith(" ")
            print(paragraph if is_example else textwrap.fill(paragraph, shutil.get_terminal_size().columns), end="\n\n")
        if task.parameters:
            self.print_columns([(one.shown, one.help) for one in task.parameters])


def main(argv: Sequence[str] | None = None, tasks: Collection = namespace) -> None:
    """Runs the `skyfab` program; with other `tasks`, that of a project."""
    binary = "skyfab" if argv is None else argv[0]
    program = _Skyfab(name="skyfab", binary=binary, version=__version__, namespace=tasks)
    try:
        with SIGTERM.as_interrupt():
            program.run(None if argv is None else list(argv))
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        discard_output()  # of invoke's own lists and helps
        sys.exit(1)
    finally:
        flush_output()
