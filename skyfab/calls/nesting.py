"""Nested pools: a function may open a pool, to a limited depth; a module that a worker imports must not.

A module that opens a pool on import would do so again in every worker of that pool, which would never end.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Final

from skyfab.context import in_a_rank
from skyfab.errors import UsageError

VARIABLE: Final = "SKYFAB_DEPTH"
"""Environment variable with the nesting depth of this process. Set for the workers of a pool, on all hosts."""
_DEEPEST: Final = 3


def check() -> None:
    """Raises UsageError if this process may not open a pool here."""
    if in_a_rank() and (frame := _module_frame()) is not None:
        _refuse(frame)
    if depth() >= _DEEPEST:
        raise UsageError(
            f"pools are nested {_DEEPEST} deep: does a function open a pool that calls it again?",
            hint="open pools in the program, and have functions return the work to do next",
        )


def depth() -> int:
    """The number of pools that this process is nested in."""
    said = os.environ.get(VARIABLE, "")
    return int(said) if said.isascii() and said.isdigit() else 0


def variables() -> dict[str, str]:
    """Environment variables for the workers of a pool that this process opens."""
    return {VARIABLE: str(depth() + 1)}


def _module_frame() -> FrameType | None:
    """The module-level frame on the stack, if a module that this worker imports or runs led here; else None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        home = str(frame.f_globals.get("__name__", ""))
        if home.startswith(("skyfab.host.agent", "skyfab.plugins")):  # frames further out are not part of the call
            return None
        code = frame.f_code
        if code.co_name == "<module>" and not code.co_filename.startswith("<"):
            return frame
        frame = frame.f_back
    return None


def _refuse(frame: FrameType) -> None:
    name, line = os.path.basename(frame.f_code.co_filename), frame.f_lineno  # noqa: PTH119
    if frame.f_globals.get("__name__") == "__main__":
        raise UsageError(
            f"{name}, line {line}: the script opens a pool while every rank runs it",
            hint=f"start it without skyfab run: python {name}; or name a function to run: skyfab run {name}:function",
        )
    raise UsageError(
        f"{name}, line {line}: the module opens a pool while a rank imports it",
        hint='open the pool below if __name__ == "__main__":',
    )
