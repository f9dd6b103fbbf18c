"""Reads the words of a command line: the task, its options, and the words after ``--``.

invoke has a parser of its own, which `invoke TASK` uses; this one says what is wrong with a line and what to type
instead, and takes hosts without ``--hosts=``.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from skyfab.cli.command import Command, Parameter
from skyfab.errors import UsageError
from skyfab.ui.hints import HINTS

HELP: Final = ("-h", "--help")
LIST: Final = ("-l", "--list")
VERBOSE: Final = ("-v", "--verbose")
VERSION: Final = ("-V", "--version")
_OURS: Final = ("--hosts", "--inventory", "--workdir")
"""Options of `exec`, which come before its command."""


@dataclass
class Line:
    """A command line that was understood."""

    task: str = ""
    """The name of the task; empty if none was named."""
    values: dict[str, Any] = field(default_factory=dict)
    """The options by the names of the parameters."""
    rest: list[str] = field(default_factory=list)
    """The words after ``--``."""
    help: bool = False
    version: bool = False
    verbose: bool = False


def read(words: Sequence[str], tasks: Mapping[str, Command]) -> Line:
    """Reads a command line. Raises UsageError, whose hint is the line to type where that is known."""
    at = words.index("--") if "--" in words else len(words)
    return _Reader(tasks, list(words[:at]), list(words[at:])).read()


class _Reader:
    def __init__(self, tasks: Mapping[str, Command], words: list[str], tail: list[str]) -> None:
        self._tasks = tasks
        self._words = words
        self._tail = tail
        """``--`` and what follows it; empty if there is none."""
        self._line = Line(rest=tail[1:])

    def read(self) -> Line:
        line, words = self._line, self._words
        for number, word in enumerate(words):
            if not word.startswith("-"):
                before, words = words[:number], words[number:]
                break
        else:
            before, words = words, []
        for word in before:
            if not self._is_general(word):
                task = next((each for each in words if each in self._tasks), "")
                raise UsageError(
                    f"there is no option {word} before a task",
                    hint=self._typed(task, *_without(self._words, task), *self._tail) if task else _help(),
                )
        if not words:
            return line
        task, *words = words
        if task == "help":
            line.help = True
            task, *words = [word for word in words if not self._is_general(word)] or [""]
        # A request for help is answered even if the rest of the line is wrong.
        if not {*HELP}.isdisjoint(words):
            line.help = True
        line.task = task
        if task and task not in self._tasks and not any(name.startswith(f"{task}.") for name in self._tasks):
            raise self._no_task(task, words)
        if not line.help and task in self._tasks:
            self._read_options(self._tasks[task], words)
        elif task not in self._tasks and words and not line.help:
            raise UsageError(f"{task} is the name of several tasks", hint=self._near(f"{task}.{words[0]}", words[1:]))
        return line

    def _is_general(self, word: str) -> bool:
        """Notes an option that every command has."""
        line = self._line
        line.help |= word in HELP
        line.verbose |= word in VERBOSE
        line.version |= word in VERSION
        return word in (*HELP, *LIST, *VERBOSE, *VERSION)

    # ---- what follows the task

    def _read_options(self, task: Command, words: list[str]) -> None:
        line, plain, taken = self._line, list[str](), list[tuple[Parameter, str]]()
        lone = next((one for one in task.parameters if one.option.plain), None)
        needed = [one for one in task.parameters if one.positional]
        at = 0
        while at < len(words):
            word, at = words[at], at + 1
            if word.startswith("-") and len(word) > 1:
                if word in VERBOSE:
                    line.verbose = True
                    continue
                parameter, value = self._option(task, word, words, at - 1)
                if value is None and parameter.takes_value and at < len(words) and not words[at].startswith("-"):
                    value, at = words[at], at + 1
                    taken.append((parameter, value))
                if not value and parameter.takes_value:
                    example = f"{parameter!r}={parameter.option.example}"
                    hint = self._typed(line.task, *words[: at - 1], example, *words[at:], *self._tail)
                    what = f"{parameter!r} needs a value" + ("" if value is None else ", and this one is empty")
                    raise UsageError(what, hint=hint if parameter.option.example else _help(line.task))
                self._take(parameter, value)
            elif needed:
                self._take(needed.pop(0), word)
            elif lone is not None:
                plain.append(word)
            else:
                raise self._too_many(task, words, at - 1)
        if lone is not None and task.rest is not None and plain and not self._tail:
            raise self._forgotten(words, self._hosts_first(words))
        if needed:
            for parameter, value in taken:
                if _is_file(value):
                    typed = f"{parameter!r}={parameter.option.value} {shlex.quote(value)}"
                    raise UsageError(f"{parameter!r} took {value} as its value: {typed}", hint=_help(line.task))
            usage = f"usage: {HINTS.program} {line.task} {task.usage}"
            raise UsageError(f"{line.task} needs {needed[0].option.value}\n{usage}", hint=_help(line.task))
        if self._tail and task.rest is None:
            raise UsageError(f"{line.task} takes no words after --", hint=self._typed(line.task, *words))
        if lone is not None and plain:
            named = line.values.get(lone.name)
            line.values[lone.name] = ",".join([*([named] if named else []), *plain])

    def _take(self, parameter: Parameter, value: str | None) -> None:
        """Notes a value; None for a flag."""
        name, values = parameter.name, self._line.values
        found = True if value is None else parameter.read(value)
        if parameter.option.joined and name in values:
            found = f"{values[name]},{found}"
        values[name] = [*values.get(name, []), found] if parameter.kind is list else found

    def _option(self, task: Command, word: str, words: list[str], at: int) -> tuple[Parameter, str | None]:
        """The option that a word is, and the value in it, if any."""
        name, equals, value = word.partition("=")
        known = {("-" if len(name) == 1 else "--") + name: one for one in task.parameters for name in one.names}
        known = {name: one for name, one in known.items() if not one.is_rest and not one.positional}
        if name in known and not known[name].takes_value and equals:
            raise UsageError(f"{name} takes no value", hint=self._typed(self._line.task, *_with(words, at, name)))
        if name in known:
            return known[name], value if equals else None
        if word[:2] in known and not word.startswith("--") and known[word[:2]].takes_value:
            return known[word[:2]], word[2:]
        scripts = [one for one in task.parameters if one.positional and one.name in self._line.values]
        if near := _nearest(name.replace("_", "-"), [one for one in known if one.startswith("--")]):
            hint = f"did you mean: {self._typed(self._line.task, *_with(words, at, near + equals + value))}"
        elif task.rest is not None and not self._tail and (scripts or any(one.option.plain for one in task.parameters)):
            raise self._forgotten(words, at if scripts else self._hosts_first(words))
        else:
            hint = _help(self._line.task)
        raise UsageError(f"{self._line.task} has no option {name}", hint=hint)

    # ---- what is wrong, and what to type

    def _no_task(self, task: str, words: list[str]) -> UsageError:
        return UsageError(f"there is no task {task!r}", hint=self._near(task, words))

    def _near(self, task: str, words: list[str]) -> str:
        if task.partition(":")[0].endswith(".py"):
            return f"did you mean: {self._typed('run', task, *words, *self._tail)}"
        near = _nearest(task.lower(), list(self._tasks))
        return f"did you mean: {self._typed(near, *words, *self._tail)}" if near else _help()

    def _too_many(self, task: Command, words: list[str], at: int) -> UsageError:
        if task.rest is not None:
            return self._forgotten(words, at)
        name, word = self._line.task, words[at]
        if word in self._tasks:
            hint = f"one after the other: {self._typed(name, *words[:at])} && {self._typed(*words[at:])}"
        elif "pip" in {one.name for one in task.parameters}:
            option = "--hosts" if word in known_hosts(words) else "--pip"
            hint = self._typed(name, *_with(words, at, f"{option}={word}"))
        else:
            hint = _help(name)
        return UsageError(f"{name} does not take {word!r}", hint=hint)

    def _hosts_first(self, words: list[str]) -> int:
        """Where the command of `exec` begins: after options and after words that are hosts of the inventory."""
        known = known_hosts(words)
        for number, word in enumerate(words):
            is_value = number > 0 and words[number - 1] in _OURS
            if not is_value and word not in known and not word.startswith((*_OURS, *VERBOSE)):
                return number
        return len(words)

    def _forgotten(self, words: list[str], at: int) -> UsageError:
        """Words from this one on belong after ``--``, but for hosts and inventory."""
        ours = [word for word in words[at:] if word.startswith(("--hosts=", "--inventory="))]
        theirs = [word for word in words[at:] if word not in ours]
        hint = self._typed(self._line.task, *ours, *words[:at], "--", *theirs, *self._tail[1:])
        return UsageError("the words of a command or script come after two dashes", hint=hint)

    def _typed(self, *words: str) -> str:
        return shlex.join([*HINTS.program.split(), *words])


def _help(task: str = "") -> str:
    return " ".join(filter(None, [HINTS.program, task, "--help"]))


def _is_file(word: str) -> bool:
    """Whether a word names a file here, or a script and a function of it."""
    name = word.partition(":")[0]
    return name.endswith(".py") or Path(name).exists()


def _with(words: list[str], at: int, word: str) -> list[str]:
    return [*words[:at], word, *words[at + 1 :]]


def _without(words: list[str], word: str) -> list[str]:
    at = words.index(word)
    return [*words[:at], *words[at + 1 :]]


def _nearest(word: str, known: Sequence[str]) -> str | None:
    import difflib

    by_letters = {each.lstrip("-"): each for each in known}
    return next((by_letters[one] for one in difflib.get_close_matches(word.lstrip("-"), by_letters, 1, 0.65)), None)


def known_hosts(words: Sequence[str], *, groups: bool = True) -> set[str]:
    """Names of hosts, aliases of ssh_config included, and of groups and tags.

    None if the inventory has mistakes, which are another message.
    """
    from skyfab.errors import SkyfabError
    from skyfab.inventory.inventory import Inventory
    from skyfab.inventory.ssh_config import aliases

    given = [word.partition("=")[2] for word in words if word.startswith("--inventory=")]
    try:
        found = Inventory.of(given[-1] if given else None)
    except SkyfabError:
        return set()
    single = {*found.hosts, *aliases(), "local"}
    tags = {tag for host in found.hosts.values() for tag in host.tags}
    return {*single, *found.groups, *tags, "all"} if groups else single
