"""Formats an exception for the command line, and chooses the exit code."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any, Final

from skyfab.errors import BroadcastError, RemoteTraceback, SkyfabError
from skyfab.ui.hints import HINTS

_OPTIONS: Final = (
    (r"Image\(includes=\['[^']*'\]\) sends it along", r"--sync sends the script's folder"),
    (r", Image\(includes=\[…\]\) sends a module of your own", r"; --sync sends the script's folder"),
    (r"Image\((\w+)=(?:\[?'([^']*)'\]?|(…))\)", r"--\1=\2\3"),
)
"""What errors say about arguments of `Image`, and the options of the command line for them."""


def print_json(value: Any) -> None:
    """Prints what `--json` asks for; dataclasses in it are objects."""
    print(json.dumps(value, default=asdict, indent=2, ensure_ascii=False))


def is_expected(error: BaseException) -> bool:
    """Whether the message is enough: an error of skyfab, or one from a host. Others are bugs in skyfab."""
    return isinstance(error, SkyfabError) or isinstance(error.__cause__, RemoteTraceback)


def exit_code(error: BaseException) -> int:
    """1: the user's code failed; 2: usage or inventory; 3: a host could not be reached or was lost."""
    first = error.exceptions[0] if isinstance(error, BroadcastError) else error
    return first.exit_code if isinstance(first, SkyfabError) else 1


def text(error: BaseException) -> str:
    """The text to print: the host's frames, and the cause on the last line."""
    from skyfab.ui import failure

    lines = failure.summary(error, "error: ").split("\n")
    return "\n".join(HINTS.adapted(as_options(line)) if "hint: " in line else as_options(line) for line in lines)


def as_options(line: str) -> str:
    """The line with options of the command line instead of arguments of `Image`.

    >>> as_options("Image(pip=…), Image(python='3.11'), Image(pip=['numpy']), PipIndex('URL', packages=('a', '…'))")
    '--pip=…, --python=3.11, --pip=numpy, --index=URL=a,…'
    """
    for pattern, option in _OPTIONS:
        line = re.sub(pattern, option, line)
    return re.sub(r"PipIndex\('([^']*)'(?:, packages=\((.*?)\))?\)", _index, line)


def _index(found: re.Match[str]) -> str:
    packages = re.findall(r"'([^']*)'", found[2] or "")
    return f"--index={found[1]}={','.join(packages) or '…'}"
