"""Makes a function a command of `skyfab`: its parameters are the options, its failures a message and an exit code."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Final, TextIO, get_args, get_origin, get_type_hints

from skyfab._util.hints import HINTS
from skyfab.cli import report
from skyfab.cli.sigterm import SIGTERM
from skyfab.ui.terminal import unwritten


@dataclass(frozen=True)
class Option:
    """Describes an option, in the annotation of its parameter: ``days: Annotated[int, Option("…")] = 30``.

    The type says what it takes: `str`, `int`, `bool` for a flag, `Sequence[str]` if it may be given several times.
    A parameter without a default is given without its name, and ``*words`` are the words after ``--``, or with
    `follows` all words after that parameter. A parameter whose type is a dataclass stands for several options, its
    fields, which commands can share.
    """

    help: str
    value: str = "TEXT"
    """What the help shows instead of a value."""
    short: str = ""
    """A short name, as f in -f."""
    least: int = 1
    """The smallest number."""
    default: str = ""
    """What the help says about the default, where that is not a value."""
    plain: bool = False
    """Words without an option's name are its values; several are joined with commas, unless it is a sequence."""
    joined: bool = False
    """If it is given again, the values are joined with commas; else the last one counts."""
    follows: bool = False
    """All words after the argument before it are its values, also those that begin with a dash."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Values that a flag may have, as ``all`` in ``--sync=all``, and the help for each."""


HOSTS: Final = (
    "hosts, groups or tags of the inventory, node[1-4], !node3 or user@10.0.0.5:2222; separate several with commas"
)
_ALL: Final = "all hosts of the inventory; this machine if there is no inventory"
Hosts = Annotated[
    str | None,
    Option(HOSTS, "HOSTS", default=_ALL, plain=True, joined=True),
]
"""Hosts, which may be named without ``--hosts=``."""
NamedHosts = Annotated[str | None, Option(HOSTS, "HOSTS", default=_ALL, joined=True)]
"""Hosts of a command whose plain words are something else."""
OneHost = Annotated[
    str | None,
    Option("a host of the inventory, or user@10.0.0.5:2222", "HOST", default="the first host of the inventory"),
]
RunHosts = Annotated[
    str | None,
    Option(
        f"where to look for the run: {HOSTS}",
        "HOSTS",
        default="all hosts of the inventory, and this machine",
        joined=True,
    ),
]
InventoryFile = Annotated[
    str | None,
    Option(
        "an inventory file or another source of hosts: ssh_config, slurm, a hostfile, an Ansible inventory",
        "FILE",
        default="$SKYFAB_INVENTORY, else ./inventory.toml, else ~/.config/skyfab/inventory.toml",
    ),
]
Json = Annotated[bool, Option("print JSON")]
RUN: Final = "the ID of the run, the beginning of the ID, or the name of the run"
RunName = Annotated[str, Option(RUN, "RUN")]
Ranks = Annotated[int | None, Option("ranks on each host", "N", default="one per GPU; one on hosts without GPUs")]
Nodes = Annotated[int | None, Option("use only the first N hosts", "N", default="all")]
Where = Annotated[
    str | None,
    Option(
        "use only hosts that meet this condition, such as 'gpu.memory >= 40GB and not busy' (docs/hosts.md)",
        "CONDITION",
    ),
]
Workdir = Annotated[
    str, Option("the working folder on the hosts: a path, temp (a temporary folder), or auto", "FOLDER")
]
Detach = Annotated[bool, Option("start a detached run and return")]


COMMAND: Final = "-- "
"""Instead of a script: any program, whose words are the arguments."""


class Exit(Exception):
    """The end of the program, with a message and an exit code."""

    def __init__(self, message: str = "", *, code: int) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class Parameter:
    """A parameter of a command: an option, an argument, or the words for the program that the command runs."""

    def __init__(self, parameter: inspect.Parameter) -> None:
        kind, option = get_args(parameter.annotation)
        self.option: Option = option
        self.name = parameter.name
        """As the function has it."""
        self.is_rest = parameter.kind is parameter.VAR_POSITIONAL
        self.positional = parameter.default is parameter.empty and not self.is_rest
        self.kind = bool if bool in (kind, *get_args(kind)) else list if get_origin(kind) is Sequence else str
        self.default = None if self.positional else parameter.default
        shown = option.default or (None if self.is_rest else self.default)
        self.help = option.help + (f" (default: {shown})" if shown else "")
        self._is_number = int in (kind, *get_args(kind))

    @property
    def flags(self) -> list[str]:
        """The option as it is typed; the long name is the last."""
        names = [*self.option.short, self.name.strip("_").replace("_", "-")]
        return [f"-{name}" if len(name) == 1 else f"--{name}" for name in names]

    def read(self, text: str) -> str | int:
        """The value that was typed. Raises ArgumentTypeError."""
        if not text:
            raise argparse.ArgumentTypeError("must not be empty")
        if self.option.words and text not in self.option.words:
            raise argparse.ArgumentTypeError(f"must be {' or '.join(self.option.words)}, not {text!r}")
        if not self._is_number:
            return text
        try:
            if (number := int(text)) >= self.option.least:
                return number
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"must be {self.option.least} or more, not {text!r}")

    def declare(self, parser: argparse.ArgumentParser) -> list[argparse.Action]:
        """Adds it to a parser. What is not given is not in the namespace: the function has the defaults."""
        text = self.help.replace("%", "%%")
        common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
        if self.is_rest:
            if self.option.follows:
                parser.add_argument(self.name, nargs="...", metavar="ARGS", help=text).required = False
            return []
        if self.kind is bool:
            actions = [parser.add_argument(*self.flags, dest=self.name, action="store_true", **common)]
            for word, text in self.option.words.items():  # with nargs="?" it would take the next argument
                common |= {"action": "store_const", "const": word, "help": text}
                actions.append(parser.add_argument(f"{self.flags[-1]}={word}", dest=self.name, **common))
            return actions
        common |= {"metavar": self.option.value, "type": self.read}
        if self.positional:
            return [parser.add_argument(self.name, **common)]
        action = "append" if self.kind is list else _Join if self.option.joined else "store"
        if self.option.plain:
            many = "extend" if self.kind is list else _Join
            plain = parser.add_argument(self.name, nargs="*", action=many, **common)
            common["help"] = f"the same as {self.option.value}"
            return [plain, parser.add_argument(*self.flags, dest=self.name, action=action, **common)]
        return [parser.add_argument(*self.flags, dest=self.name, action=action, **common)]


class _Join(argparse.Action):
    """Joins the values with commas, if it is given several times."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option_string: object = None
    ) -> None:
        given = [values] if isinstance(values, str) else values
        setattr(namespace, self.dest, ",".join([*filter(None, [getattr(namespace, self.dest, "")]), *given]))


class Command:
    """A function with its parameters, which reports failures, whichever program runs it."""

    def __init__(self, function: Callable[..., int | None]) -> None:
        self.function = function
        self.name = function.__name__.strip("_").replace("_", ".")
        self._signature = inspect.signature(function, eval_str=True)
        declared = self._signature.parameters.values()
        self._groups: dict[str, Any] = {one.name: one.annotation for one in declared if is_dataclass(one.annotation)}
        self.parameters = [Parameter(one) for each in declared for one in _expanded(each)]
        self.rest = next((one for one in self.parameters if one.is_rest), None)
        """What takes the words for the program that it runs."""
        self.takes_inventory = any(one.name == "inventory" for one in self.parameters)

    @property
    def usage(self) -> str:
        """What follows the command's name on the command line."""
        needed = [one.option.value for one in self.parameters if one.positional]
        plain = [f"[{one.option.value} ...]" for one in self.parameters if one.option.plain]
        rest = [self.rest.option.value] if self.rest else []
        return " ".join(["[options]", *needed, *plain, *rest])

    def perform(self, given: Mapping[str, Any], rest: Sequence[str]) -> None:
        """Runs the function with these options. Raises Exit unless it succeeds."""
        values = dict(given)
        for name, group in self._groups.items():
            values[name] = group(**{one.name: values.pop(one.name) for one in fields(group) if one.name in values})
        bound = self._signature.bind_partial(**values)
        if self.rest is not None:
            bound.arguments[self.rest.name] = tuple(rest)
        with HINTS.of_command(given.get("inventory")):
            if code := _reported(lambda: self.function(*bound.args, **bound.kwargs)):
                raise Exit(code=code)


def _expanded(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """The parameter, or if it stands for several options, one for each. Fields without an `Option` are left out."""
    group = parameter.annotation
    if not is_dataclass(group):
        return [parameter]
    types = get_type_hints(group, include_extras=True)
    return [
        parameter.replace(name=one.name, default=one.default, annotation=types[one.name], kind=parameter.KEYWORD_ONLY)
        for one in fields(group)
        if get_origin(types[one.name]) is Annotated
    ]


command: Final = Command
"""Makes a function a command: its docstring is the help, and what it returns the exit code."""


def discard_output(stream: TextIO | None = None) -> None:
    """Drops what could not be written, to stdout if no other is given: it would be another error at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())


def flush_output() -> None:
    """Ends the program with 1 if what it printed could not be written, as to a full disk.

    Messages on stderr that could not be written are dropped: the exit code says the same.
    """
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except OSError:
        discard_output(sys.stderr)  # else Python fails to write them again, and ends with 120
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
        if unwritten:
            raise unwritten.pop()
    except OSError as error:
        discard_output()
        sys.exit(1 if isinstance(error, BrokenPipeError) else f"error: standard output: {error.strerror}")


def _called(body: Callable[[], int | None]) -> int | None:
    try:
        return body()
    except RuntimeError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # in __set_name__, while modules are imported: Python 3.11
            raise error.__cause__ from None
        raise


def _reported(body: Callable[[], int | None]) -> int | None:
    try:
        code = _called(body)
        if sys.stdout is not None:
            sys.stdout.flush()
        return SIGTERM.code if code == 130 and SIGTERM.came else code
    except KeyboardInterrupt as error:
        from skyfab.ui.failure import stopped

        text, code = ("terminated", SIGTERM.code) if SIGTERM.came else ("interrupted", 130)
        text = ": ".join([text, *stopped(error)])
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
