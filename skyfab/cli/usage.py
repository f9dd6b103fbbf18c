"""The help: the list of tasks, and what one task does, with its options, their defaults and examples."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Final

from skyfab.cli.command import Command
from skyfab.ui.hints import HINTS

_GENERAL: Final = (
    ("-v, --verbose", "show the ssh commands and what is waited for, with seconds; tracebacks with all frames"),
    ("-h, --help", "show this"),
)
_WIDEST: Final = 100
"""Columns of text that are still comfortable to read."""


def of_all(tasks: Mapping[str, Command], group: str = "") -> str:
    """The list of tasks; with `group`, of those whose names begin with it."""
    chosen = {name: task for name, task in tasks.items() if name.startswith(group)}
    program = HINTS.program
    return "\n".join(
        [
            f"Usage: {program} TASK [--options]",
            "",
            "Tasks:",
            *_columns([(name, _first_line(task)) for name, task in chosen.items()]),
            "",
            "General options:",
            *_columns(_GENERAL),
            "",
            *_wrapped(f"More about one of them: {program} TASK --help"),
        ]
    )


def of_task(name: str, task: Command) -> str:
    """The help of one task."""
    paragraphs = (inspect.getdoc(task.function) or "").split("\n\n")
    texts = [text for text in paragraphs if not text.startswith(" ")]
    lines = [*_wrapped(f"Usage: {HINTS.program} {name} {task.usage}".rstrip(), "    ")]
    for text in texts:
        lines += ["", *_wrapped(" ".join(text.split()))]
    examples = [line for text in paragraphs if text.startswith(" ") for line in text.splitlines()]
    lines += ["", "Examples:", *(_example(line) for line in examples)] if examples else []
    if task.parameters:
        lines += ["", "Options:", *_columns([(one.shown, one.help or "") for one in task.parameters])]
    return "\n".join([*lines, "", "General options:", *_columns(_GENERAL)])


def _example(line: str) -> str:
    """Commands of ours begin with the program's name here; they are not wrapped, so that they can be copied."""
    return f"  {line.strip()}".replace("  skyfab ", f"  {HINTS.program} ", 1)


def _first_line(task: Command) -> str:
    return (inspect.getdoc(task.function) or "").partition("\n")[0]


def _width() -> int:
    return max(20, min(shutil.get_terminal_size().columns, _WIDEST))


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _width(), subsequent_indent=indent, break_on_hyphens=False)


def _columns(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Names and their explanations, side by side; where there is no room for that, below each other."""
    left = max((len(name) for name, _ in rows), default=0)
    if left > _width() // 2:
        left = max((len(name) for name, _ in rows if len(name) <= _width() // 3), default=8)
    lines = []
    for name, text in rows:
        indent = " " * (left + 4)
        if len(indent) > _width() - 20:
            indent = " " * 6
        wrapped = textwrap.wrap(text, _width(), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        if len(name) + 4 > len(indent):
            lines.append(f"  {name}")
        elif wrapped:
            wrapped[0] = f"  {name}".ljust(len(indent)) + wrapped[0].lstrip()
        else:
            wrapped = [f"  {name}"]
        lines += wrapped
    return lines
