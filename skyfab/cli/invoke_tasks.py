"""The commands as tasks of invoke, for a project's own tasks.py: ``from skyfab.cli import namespace``."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

import invoke

from skyfab.cli.command import Command, Exit, Parameter
from skyfab.cli.tasks import COMMANDS


class Argument(invoke.Argument):
    """A parameter of a command. Values are checked when they are parsed."""

    def __init__(self, parameter: Parameter) -> None:
        self._parameter = parameter
        names = [flag.lstrip("-") for flag in reversed(parameter.flags)]
        super().__init__(
            names=names,
            attr_name=None if names[0] == parameter.name else parameter.name,
            kind=str if parameter.option.words else parameter.kind,
            optional=bool(parameter.option.words),
            default=parameter.default,
            positional=parameter.positional,
            help=parameter.help,
        )

    def __repr__(self) -> str:
        """The option as it is typed: invoke quotes this in messages."""
        return self._parameter.flags[-1]

    def set_value(self, value: Any, cast: bool = True) -> None:
        if self.takes_value and value is not True:
            try:
                value = self._parameter.read(value)
            except argparse.ArgumentTypeError as error:
                raise invoke.Exit(f"error: {self!r} {error}", code=2) from None
        super().set_value(value, cast and isinstance(value, (str, bool)))


class Task(invoke.Task[Callable[..., None]]):
    """A command."""

    def __init__(self, command: Command) -> None:
        self._command = command

        @functools.wraps(command.function)
        def body(_: invoke.Context, **given: Any) -> None:
            try:
                command.perform(given, _after_dashes())
            except Exit as end:
                raise invoke.Exit(end.message or None, code=end.code) from end.__cause__

        super().__init__(body, name=command.name.rpartition(".")[2], positional=())

    def get_arguments(self, ignore_unknown_help: bool | None = None) -> list[invoke.Argument]:
        return [Argument(one) for one in self._command.parameters if not one.is_rest]


def _after_dashes() -> list[str]:
    """The words after ``--``, which invoke does not pass on to a task."""
    return sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []


def _collection() -> invoke.Collection:
    found = invoke.Collection()
    for name, command in COMMANDS.items():
        group = name.rpartition(".")[0]
        if group and group not in found.collections:
            found.add_collection(invoke.Collection(group))
        (found.collections[group] if group else found).add_task(Task(command))
    return found


namespace = _collection()
"""All commands, as a collection of invoke."""
