"""Parses command lines with argparse: a parser for each command, made from the parameters of its function."""

from __future__ import annotations

import argparse
import functools
import inspect
import shlex
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from skyfab._util.hints import HINTS
from skyfab._util.suggest import nearest
from skyfab.cli.command import COMMAND, Command
from skyfab.errors import UsageError

_WIDEST: Final = 100
"""Columns of text that are still comfortable to read."""
_VERBOSE: Final = "show ssh commands, what the program waits for, and full tracebacks"


@dataclass(frozen=True, kw_only=True)
class Line:
    """A command line that was understood."""

    command: str
    """Empty if only general options were given."""
    values: Mapping[str, Any]
    """The options, by the names of the parameters."""
    rest: Sequence[str] = ()
    """The words for the program that the command runs."""
    verbose: bool = False


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError instead of ending the program."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **options)
        self.add_argument("-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help=_VERBOSE)

    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ").replace(": must ", " must ", 1)
        flag, is_flag, value = text.partition(": ignored explicit argument ")
        if is_flag:
            forms = [one for one in self._option_string_actions if one.partition("=")[0] in flag.split("/")]
            text = f"invalid value {value}: expected {' or '.join(forms)}"
        raise UsageError(text, hint=f"{self.prog} --help")

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)  # argparse ignores errors of writing


class CommandParser(Parser):
    """The parser of one command."""

    def __init__(self, command: Command, **options: Any) -> None:
        program, text = HINTS.program, inspect.getdoc(command.function) or ""
        super().__init__(
            **options | {"prog": f"{program} {command.name}"},
            usage=f"{program} {command.name} {command.usage}",
            description=text.replace("\n    skyfab ", f"\n    {program} "),
        )
        self.actions = [one for each in command.parameters for one in each.declare(self)]
        """Of its options."""


class CommandLine:
    """The parser of a program that has these commands. Loads only the command that is typed, unless help lists all."""

    def __init__(self, commands: Mapping[str, Command]) -> None:
        self._commands = commands
        self.parsers: dict[str, CommandParser] = {}
        """By the names of the commands: of all of them once `parser` has been used."""

    @functools.cached_property
    def parser(self) -> Parser:
        """The parser of the whole program, with all commands."""
        program = HINTS.program
        parser = Parser(
            prog=program, usage=f"{program} COMMAND [options]", epilog=f"{program} COMMAND --help describes a command."
        )
        parser.add_argument("-V", "--version", action="store_true", help="print the version")
        subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=CommandParser)
        for name, command in self._commands.items():
            summary = (inspect.getdoc(command.function) or "").partition("\n")[0]
            self.parsers[name] = subparsers.add_parser(name, command=command, help=summary.replace("%", "%%"))
        return parser

    def parse(self, words: Sequence[str]) -> Line:
        """Reads a command line; prints help if that is asked for, and exits. Raises UsageError."""
        words = list(words) or ["--help"]
        if words[0] in ("help", "-h", "--help", "-l", "--list"):  # invoke has `--list`, and `--help TASK`
            words = [*words[1:2], "--help"]
        at = next((number for number, word in enumerate(words) if not word.startswith("-")), len(words))
        general = argparse.Namespace()
        if at:
            _, unknown = self.parser.parse_known_args(words[:at], general)
            if unknown:
                hint = f"{HINTS.program} --help"
                if command := self._commands.get("".join(words[at : at + 1])):
                    known = [flag for action in CommandParser(command).actions for flag in action.option_strings]
                    if all(one.partition("=")[0] in known for one in unknown):
                        hint = f"options follow the command: {_typed(words[at], *words[:at], *words[at + 1 :])}"
                raise UsageError(f"unknown option {unknown[0]}", hint=hint)
        if at == len(words):
            return Line(command="", values={})
        name, given = words[at], words[at + 1 :]
        if name not in self._commands:
            raise self._unknown_command(name, given)
        return self._parse_command(name, given, verbose="verbose" in general)

    def _parse_command(self, name: str, words: list[str], *, verbose: bool) -> Line:
        command, own, rest = self._commands[name], words, list[str]()
        parser = self.parsers.setdefault(name, CommandParser(command))
        HINTS.words = [word for word in words if not word.startswith("--inventory=")]
        if command.rest is not None and not command.rest.option.follows and "--" in words:
            at = words.index("--")
            own, rest = words[:at], words[at + 1 :]
        if command.rest is not None and command.rest.option.follows:
            own = _with_one_target(parser, words)
        # argparse takes hosts on both sides of an option only in this way.
        has_plain = any(one.option.plain for one in command.parameters)
        found, unknown = (parser.parse_known_intermixed_args if has_plain else parser.parse_known_args)(own)
        values = vars(found)
        if unknown:
            raise self._unknown_words(unknown, name, words)
        if command.rest is not None and command.rest.option.follows:
            rest = values.pop(command.rest.name)
            rest = rest[1:] if rest[:1] == ["--"] else rest
        verbose = values.pop("verbose", verbose)
        return Line(command=name, values=values, rest=rest, verbose=verbose)

    def _unknown_command(self, name: str, words: Sequence[str]) -> UsageError:
        near = nearest(name.lower(), self._commands)
        if name.partition(":")[0].endswith(".py"):
            near, words = "run", [name, *words]
        elif words and f"{name}.{words[0]}" in self._commands:
            near, words = f"{name}.{words[0]}", words[1:]
        hint = f"did you mean: {_typed(near, *words)}" if near else f"{HINTS.program} --help"
        return UsageError(f"unknown command {name!r}", hint=hint)

    def _unknown_words(self, unknown: Sequence[str], command: str, words: Sequence[str]) -> UsageError:
        help_ = f"{HINTS.program} {command} --help"
        word = next((one for one in unknown if one.startswith("-")), None)
        rest = self._commands[command].rest
        if rest is not None and not unknown[0].startswith("-") and "--" not in words:
            at = words.index(unknown[0])
            help_ = f"put the program after --: {_typed(command, *words[:at], '--', *words[at:])}"
            word = None
        if word is None:
            if any(one.positional and one.option.value == "PATH" for one in self._commands[command].parameters):
                help_ = f"{command} copies one path: repeat the command for {shlex.quote(unknown[0])}"
            return UsageError(f"unexpected argument {unknown[0]!r}", hint=help_)
        name, equals, value = word.partition("=")
        flags = [flag for action in self.parsers[command].actions for flag in action.option_strings]
        known = {flag.lstrip("-"): flag for flag in flags}
        near = known.get(nearest(name.lstrip("-").replace("_", "-"), known) or "")
        typed = [f"{near}{equals}{value}" if one == word else one for one in words]
        if rest is not None and not rest.option.follows:
            if "--" not in words and rest.option.value.startswith("[") and all("=" in one for one in unknown):
                help_ = _typed(command, *(one for one in words if one not in unknown), "--", *unknown)
            help_ = f"options of the program follow after --: {help_}"
        elif rest is not None and not word.startswith("-m"):
            help_ = f"options of the program follow it: {_typed(command, *(one for one in words if one != word), word)}"
        return UsageError(f"unknown option {name}", hint=f"did you mean: {_typed(command, *typed)}" if near else help_)


def _with_one_target(parser: CommandParser, words: list[str]) -> list[str]:
    """Joins ``-m MODULE`` where a script may be, and marks ``--``, so that argparse takes each as one word."""
    with_value = {flag for action in parser.actions if action.nargs is None for flag in action.option_strings}
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "--"):
        at += 2 if words[at] in with_value else 1
    if words[at : at + 1] == ["-m"]:
        return [*words[:at], "-m " + "".join(words[at + 1 : at + 2]), *words[at + 2 :]]
    return [*words[:at], COMMAND, *words[at + 1 :]] if words[at : at + 1] == ["--"] else words


def _typed(*words: str) -> str:
    return shlex.join([*HINTS.program.split(), *words])


class _Formatter(argparse.HelpFormatter):
    """Wraps each paragraph of a description; examples, which are indented, stay as they are, to be copied."""

    def __init__(self, prog: str, **options: Any) -> None:
        width = min(shutil.get_terminal_size().columns, _WIDEST)
        super().__init__(prog, **{"max_help_position": 28, "width": width, **options})

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = []
        for paragraph in text.split("\n\n"):
            if paragraph.startswith(" "):
                parts.append("examples:\n" + textwrap.indent(textwrap.dedent(paragraph), "  "))
            else:
                parts.append(textwrap.fill(" ".join(paragraph.split()), width, break_on_hyphens=False))
        return "\n\n".join(parts)
