"""The user's line that an instruction comes from."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

CallSite = tuple[CodeType, int] | None
"""A line of the program: a code object, and the last bytecode that was executed in it."""

_OURS: Final = f"{Path(__file__).parents[1]}/"
_frame: Final = sys._getframe
_internal: Final[dict[str, bool]] = {}
"""By file."""
_known: Final = _internal.get


def find_call_site() -> CallSite:
    """The innermost frame that is neither torch's nor ours. The function that calls this, and its caller, are ours."""
    try:
        frame: FrameType | None = _frame(3)
    except ValueError:  # no more of them, on a thread of torch's own
        return None
    while frame is not None:
        code = frame.f_code
        hidden = _known(code.co_filename)
        if hidden is None:
            hidden = _internal[code.co_filename] = _is_internal(code.co_filename)
        if not hidden:
            return code, frame.f_lasti
        frame = frame.f_back
    return None


def _is_internal(file: str) -> bool:
    torch = sys.modules.get("torch")
    theirs = f"{Path(torch.__file__).parent}/" if torch is not None and torch.__file__ else _OURS
    return file.startswith((_OURS, theirs, "<kernel of ", "<frozen ")) or file == "<string>"


def describe(site: CallSite) -> str | None:
    """File and line of a call site."""
    if site is None:
        return None
    code, last = site
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= last < end and number is not None:
            line = number
    return f"{code.co_filename}:{line}"
