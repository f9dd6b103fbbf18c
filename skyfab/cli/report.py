"""Formats an exception for the command line, and chooses the exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from skyfab._util.hints import HINTS
from skyfab.errors import BroadcastError, RemoteTraceback, SkyfabError


def print_json(value: Any) -> None:
    """Prints what `--json` asks for; dataclasses in it are objects."""
    print(json.dumps(value, default=asdict, indent=2))  # only ASCII: parts may come from hosts


def print_errors(errors: Sequence[SkyfabError]) -> int:
    """Prints the errors of hosts that do not answer. Returns the exit code."""
    for error in errors:
        print(text(error), file=sys.stderr)
    return 3 if errors else 0


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
    return "\n".join(HINTS.adapted(line) if "hint: " in line else line for line in lines)
