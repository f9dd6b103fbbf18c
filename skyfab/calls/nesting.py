"""Pools inside pools: a function may open one on purpose, up to a depth; a module that a rank imports may not.

A module that opens a pool while it is imported would do so again in every rank of that pool, and so on without end.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Final

from skyfab.context import in_a_rank
from skyfab.errors import UsageError

VARIABLE: Final = "SKYFAB_DEPTH"
"""How many pools this process is inside of; ranks get it with their environment, on whichever host they are."""
_DEEPEST: Final = 3


def check() -> None:
    """Raises UsageError where no pool may be opened."""
    frame = _module_frame() if in_a_rank() else None
    if frame is not None:
        _refuse(frame)
    if depth() >= _DEEPEST:
        raise UsageError(
            f"a pool inside a pool, {_DEEPEST} deep already: does a function open one that calls it again?",
            hint="open pools in the program, and have functions return what is to be done next",
        )


def depth() -> int:
    """Inside of how many pools this process runs."""
    said = os.environ.get(VARIABLE, "")
    return int(said) if said.isascii() and said.isdigit() else 0


def variables() -> dict[str, str]:
    """What the ranks of a pool that this process opens are told."""
    return {VARIABLE: str(depth() + 1)}


def _module_frame() -> FrameType | None:
    """The statement of a module, as it is imported or run by this rank, that leads to here; else None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        home = str(frame.f_globals.get("__name__", ""))
        if home.startswith(("skyfab.agent", "skyfab.plugins")):  # what is further out was there before the call
            return None
        code = frame.f_code
        if code.co_name == "<module>" and not code.co_filename.startswith("<"):
            return frame
        frame = frame.f_back
    return None


def _refuse(frame: FrameType) -> None:
    file, line = frame.f_code.co_filename, frame.f_lineno
    name = os.path.basename(file)  # noqa: PTH119
    guard = 'if __name__ == "__main__":'
    if frame.f_globals.get("__name__") == "__main__":
        raise UsageError(
            f"{file}, line {line}: the script opens a pool while every rank runs it",
            hint=f"start it without skyfab run: python {name}; or put that below {guard} "
            f"and name what ranks should run: skyfab run {name}:function",
        )
    raise UsageError(
        f"{file}, line {line}: the module opens a pool while a rank imports it",
        hint=f"put what opens the pool below {guard}",
    )
