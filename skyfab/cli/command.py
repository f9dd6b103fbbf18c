"""Makes a function a command of `skyfab`: its parameters are the options, its failures a message and an exit code."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, get_args, get_origin

from invoke import Argument, Context, Exit, Task

from skyfab.cli import report
from skyfab.cli.sigterm import SIGTERM
from skyfab.errors import UsageError
from skyfab.ui.hints import HINTS


@dataclass(frozen=True)
class Option:
    """Describes an option, in the annotation of its parameter: ``days: Annotated[int, Option("…")] = 30``.

    The type says what it takes: `str`, `int`, `bool` for a flag, `Sequence[str]` if it may be given several times.
    A parameter without a default is given without its name, and ``*words`` are the words after ``--``.
    """

    help: str
    value: str = "TEXT"
    """What the help shows in place of a value."""
    short: str = ""
    """A short name, as f in -f."""
    least: int = 1
    """The smallest number."""
    default: str = ""
    """What the help says about the default, where that is not a value."""
    example: str = ""
    """A value for messages."""
    plain: bool = False
    """Words without an option's name are its values; several are joined with commas."""


_HOSTS: Final = "names, groups or tags of the inventory, node[1-4], !node3, user@10.0.0.5:2222; several with commas"
_ALL: Final = "all hosts of the inventory, this machine where there is none"
Hosts = Annotated[
    str | None, Option(f"{_HOSTS}; also without --hosts=", "HOSTS", default=_ALL, example="all", plain=True)
]
"""Hosts, which may be named without ``--hosts=``."""
NamedHosts = Annotated[str | None, Option(_HOSTS, "HOSTS", default=_ALL, example="all")]
"""Hosts of a command whose plain words are something else."""
RunHosts = Annotated[
    str | None,
    Option(f"where to look for it: {_HOSTS}", "HOSTS", default="all of the inventory, and this machine", example="all"),
]
InventoryFile = Annotated[
    str | None,
    Option(
        "the file that names the hosts",
        "FILE",
        default="$SKYFAB_INVENTORY, else ./inventory.toml, else ~/.config/skyfab/inventory.toml",
        example="inventory.toml",
    ),
]
Json = Annotated[bool, Option("print a list for programs")]
RunName = Annotated[str, Option("the run: its id, the beginning of that, or its name", "RUN")]
Ranks = Annotated[
    int | None, Option("ranks on each host", "N", default="one per GPU, one where there is none", example="2")
]
Workdir = Annotated[str, Option("where relative paths lead: a folder on the hosts, temp, or auto", "FOLDER")]
Detach = Annotated[bool, Option("leave it to the hosts, and end; pressing d does so later")]


class Parameter(Argument):
    """A parameter of a command, for invoke's parser. Values are checked when they are parsed."""

    def __init__(self, parameter: inspect.Parameter) -> None:
        kind, option = get_args(parameter.annotation)
        is_needed = parameter.default is parameter.empty
        default = None if is_needed else parameter.default
        name = parameter.name.strip("_").replace("_", "-")
        super().__init__(
            names=(name, *option.short),
            attr_name=None if name == parameter.name else parameter.name,
            kind=bool if kind is bool else list if get_origin(kind) is Sequence else str,
            default=default,
            positional=is_needed and parameter.kind is not parameter.VAR_POSITIONAL,
            help=option.help + (f" (default: {shown})" if (shown := option.default or default) else ""),
        )
        self.option: Option = option
        self.is_rest = parameter.kind is parameter.VAR_POSITIONAL
        self._is_number = int in (kind, *get_args(kind))

    def __repr__(self) -> str:
        """The option as it is typed: invoke quotes this in messages."""
        name = self.names[0]
        return f"-{name}" if len(name) == 1 else f"--{name}"

    @property
    def shown(self) -> str:
        """The option and its value as the help shows them."""
        if self.positional or self.is_rest:
            return self.option.value
        short = f"-{self.option.short}, " if self.option.short else ""
        between = " " if len(self.names[0]) == 1 else "="
        return f"{short}{self!r}" + (f"{between}{self.option.value}" if self.takes_value else "")

    @property
    def is_flag(self) -> bool:
        return not self.takes_value

    def read(self, text: str) -> str | int:
        """The value that was typed. Raises UsageError."""
        if not text:
            raise UsageError(f"{self.option.value if self.positional else f'{self!r}='} is empty")
        if not self._is_number:
            return text
        if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < self.option.least:
            raise UsageError(f"{self!r}={text[:40]}: a whole number from {self.option.least} on")
        return int(text)

    def set_value(self, value: Any, cast: bool = True) -> None:
        """Used by invoke's own parser: `invoke TASK`."""
        if self.takes_value:
            try:
                value = self.read(value)
            except UsageError as error:
                raise Exit(report.text(error), code=2) from None
        super().set_value(value, cast and isinstance(value, (str, bool)))


class Command(Task[Callable[..., None]]):
    """A task with the parameters of a function, which reports failures, whichever program runs it."""

    def __init__(self, function: Callable[..., int | None]) -> None:
        self._function = function
        self._signature = inspect.signature(function, eval_str=True)
        self.parameters = [Parameter(one) for one in self._signature.parameters.values()]
        self.rest = next((one for one in self.parameters if one.is_rest), None)
        """What takes the words after ``--``."""

        @functools.wraps(function)
        def body(_: Context, **given: Any) -> None:
            self.perform(given, _after_dashes())

        super().__init__(body, name=function.__name__.strip("_"), positional=())
        if "inventory" in self._signature.parameters:
            HINTS.with_inventory.add(self.name)

    @property
    def usage(self) -> str:
        """What follows the command's name on the command line."""
        needed = [one.shown for one in self.parameters if one.positional]
        plain = [f"[{one.option.value}]" for one in self.parameters if one.option.plain]
        rest = [one.shown for one in self.parameters if one.is_rest]
        options = [one for one in self.parameters if not one.positional and not one.is_rest]
        return " ".join([*(["[--options]"] if options else []), *needed, *plain, *rest])

    def perform(self, given: Mapping[str, Any], rest: Sequence[str]) -> None:
        """Runs the function with these options. Raises Exit unless it succeeds."""
        bound = self._signature.bind_partial(**given)
        if self.rest is not None:
            bound.arguments[str(self.rest.name)] = tuple(rest)
        with HINTS.inventory_is(given.get("inventory")):
            if code := _reported(lambda: self._function(*bound.args, **bound.kwargs)):
                raise Exit(code=code)

    def get_arguments(self, ignore_unknown_help: bool | None = None) -> list[Argument]:
        return [one for one in self.parameters if not one.is_rest]


def command(function: Callable[..., int | None]) -> Command:
    """Makes a function a command: its docstring is the help, and what it returns the exit code."""
    return Command(function)


def _after_dashes() -> list[str]:
    """The arguments after ``--``, which invoke does not pass on to a task."""
    return sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []


def discard_output() -> None:
    """Drops what could not be written, which would be another error when the program ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def flush_output() -> None:
    """Ends the program with 1 if what it printed could not be written, as to a full disk."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        discard_output()
        sys.exit(1 if isinstance(error, BrokenPipeError) else f"error: standard output: {error.strerror}")


def _reported(body: Callable[[], int | None]) -> int | None:
    try:
        code = body()
        if sys.stdout is not None:
            sys.stdout.flush()
        return SIGTERM.code if code == 130 and SIGTERM.came else code
    except KeyboardInterrupt as error:
        text, code = ("terminated", SIGTERM.code) if SIGTERM.came else ("interrupted", 130)
        text = ": ".join([text, *filter(None, [getattr(error, "stopped", "")])])
        raise Exit(f"\n{text}" if sys.stderr.isatty() else text, code=code) from None
    except BrokenPipeError:  # a closed pipe (`| head`)
        discard_output()
        raise Exit(code=1) from None
    except Exception as error:
        if not report.is_expected(error):
            raise
        if os.environ.get("SKYFAB_TRACE"):
            traceback.print_exc()
        raise Exit(report.text(error), code=report.exit_code(error)) from error
