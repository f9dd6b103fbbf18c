"""`skyfab completion`: scripts with which shells complete tasks, options, and names of hosts, groups and runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

from skyfab.cli import run_history
from skyfab.cli.command import Command, Option, Parameter, command
from skyfab.cli.words import HELP, VERBOSE, known_hosts
from skyfab.errors import UsageError

_SHELLS: Final = ("bash", "zsh", "fish")
"""Each has a script beside this module."""


@command
def completion(shell: Annotated[str, Option("bash, zsh or fish", "SHELL")]) -> None:
    """Print a script that completes what you type.

    Tasks, options, hosts and groups of the inventory, aliases of ssh_config, and runs that this machine has started. No
    host is asked.
    Put the line for your shell into its start-up file:

        eval "$(skyfab completion bash)"
        eval "$(skyfab completion zsh)"
        skyfab completion fish | source
    """
    if shell not in _SHELLS:
        raise UsageError(f"no script for {shell!r}; there are {', '.join(_SHELLS)}", hint="skyfab completion bash")
    print(Path(__file__).with_name(f"completion.{shell}").read_text(encoding="utf-8"), end="")


def candidates(arguments: Sequence[str], tasks: Mapping[str, Command]) -> list[str]:
    """Words that may stand where the cursor is, after the line up to there."""
    line = arguments[0] if arguments else ""
    try:
        _, *words = shlex.split(line)
    except ValueError:  # an open quote
        return []
    typed = words.pop() if words and not line[-1:].isspace() else ""
    if "--" in words:
        return []
    task = next((word for word in words if not word.startswith("-")), "")
    if task in ("", "help"):
        found = [*tasks, "help"] if not typed.startswith("-") else [*HELP, *VERBOSE, "--version"]
    elif task not in tasks:
        found = []
    else:
        found = _for_task(tasks[task], words[words.index(task) + 1 :], typed)
    return [word for word in found if word.startswith(typed)]


def _for_task(task: Command, words: list[str], typed: str) -> list[str]:
    if typed.startswith("-") and "=" not in typed:
        given = {word.partition("=")[0] for word in words}
        options = [one for one in task.parameters if not one.positional and not one.is_rest]
        unused = [one for one in options if repr(one) not in given or one.kind is list]
        return [f"{one!r}=" if one.takes_value else repr(one) for one in unused] + ["--help", "--verbose"]
    by_name = {repr(one): one for one in task.parameters}
    name, equals, _ = typed.partition("=")
    if equals and name in by_name:
        return [f"{name}={value}" for value in _values(by_name[name], words, typed.partition("=")[2])]
    if words and words[-1] in by_name and by_name[words[-1]].takes_value:
        return _values(by_name[words[-1]], words, typed)
    plain = [word for word in words if not word.startswith("-")]
    needed = [one for one in task.parameters if one.positional]
    if len(plain) < len(needed):
        return _values(needed[len(plain)], words, typed)
    return [value for one in task.parameters if one.option.plain for value in _values(one, words, typed)]


def _values(parameter: Parameter, words: Sequence[str], typed: str) -> list[str]:
    """What may be given for it; nothing where a shell's own completion, of files, is right."""
    kind = parameter.option.value
    if kind == "HOST":
        return sorted(known_hosts(words, groups=False))
    if kind == "HOSTS":
        before = typed[: typed.rfind(",") + 1]
        return [before + name for name in sorted(known_hosts(words)) if name not in before.split(",")]
    if kind == "RUN":
        return run_history.names()
    return list(_SHELLS) if kind == "SHELL" else []
