"""What a trial of a sweep reports: written by the trial, read by the sweep's driver on the same host."""

from __future__ import annotations

import json
import os

TYPE_CHECKING = False  # as in all modules that hosts import
if TYPE_CHECKING:
    from typing import Any

REPORT = "SKYFAB_REPORT"
"""The variable that names the file for the results of a trial."""
_MOST = 60_000
"""Bytes of all values."""


def report(**values: Any) -> None:
    """Reports `values` of a trial, for the table of ``skyfab sweep``: ``sky.report(loss=0.3, epoch=4)``.

    The last value of each name counts. Numbers of numpy and torch are taken as Python's; other objects that JSON does
    not have raise TypeError. Does nothing in a program that is not a trial.
    """
    if not (path := os.environ.get(REPORT)):
        return
    import warnings
    from _thread import get_ident

    found = reported(path)
    for name, value in values.items():
        value = value.item() if hasattr(value, "item") else value
        if not isinstance(value, (int, float, str, type(None))):
            raise TypeError(f"report({name}=…): expected a number or a string, not a {type(value).__name__}")
        is_finite = not isinstance(value, float) or abs(value) < float("inf")
        found[name] = value if is_finite else str(value)  # JSON has neither infinity nor NaN
    text = json.dumps(found)
    if len(text) > _MOST:
        warnings.warn(f"not reported: {', '.join(values)[:200]}: all values have {len(text):,} bytes", stacklevel=2)
        return
    draft = f"{path}.{os.getpid()}.{get_ident()}"
    with open(draft, "w") as file:
        file.write(text)
    os.replace(draft, path)


def reported(path: str) -> dict[str, Any]:
    """What a trial has reported so far. The file may contain anything."""
    try:
        with open(path, "rb") as file:
            found = dict(json.loads(file.read(_MOST)))
            return {name: one for name, one in found.items() if isinstance(one, (str, int, float, type(None)))}
    except (OSError, ValueError, TypeError, RecursionError):
        return {}
