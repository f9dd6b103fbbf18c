"""The user's line that an instruction comes from."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType
from typing import Final

Where = tuple[CodeType, int] | None
"""A place in the program: a code object, and the last bytecode that was executed in it."""

_OURS: Final = f"{Path(__file__).parents[1]}/"
_internal: Final[dict[CodeType, bool]] = {}


def where() -> Where:
    """The innermost frame that is neither torch's nor ours."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        hidden = _internal.get(code)
        if hidden is None:
            hidden = _internal[code] = _is_internal(code.co_filename)
        if not hidden:
            return code, frame.f_lasti
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _is_internal(file: str) -> bool:
    torch = sys.modules.get("torch")
    theirs = f"{Path(torch.__file__).parent}/" if torch is not None and torch.__file__ else _OURS
    return file.startswith((_OURS, theirs, "<kernel of ", "<frozen ")) or file == "<string>"


def describe(place: Where) -> str | None:
    """File and line of a place."""
    if place is None:
        return None
    code, last = place
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= last < end and number is not None:
            line = number
    return f"{code.co_filename}:{line}"
