"""Reads a file of a detached run."""

from __future__ import annotations

import os

TYPE_CHECKING = False  # importing `typing` would slow the start
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Final

_PIECE: Final = 1024 * 1024


def read(cache: str, *, run: str, name: str) -> Iterator[Any]:
    """Yields whether the file is there, and then its content in pieces. `name` is a file in the folder of the run."""
    path = os.path.join(cache, "runs", os.path.basename(run), os.path.basename(name))
    try:
        with open(path, "rb") as file:
            yield True
            while piece := file.read(_PIECE):
                yield None, piece
    except FileNotFoundError:
        yield False
