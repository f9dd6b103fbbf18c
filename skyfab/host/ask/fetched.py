"""Marks a detached run whose results were fetched: `gc` deletes it sooner."""

from __future__ import annotations

import os


def fetched(cache: str, *, run: str) -> None:
    """Raises OSError on a full disk."""
    with open(os.path.join(cache, "runs", os.path.basename(run), "fetched"), "w"):
        pass
