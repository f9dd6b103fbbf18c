"""Reads a file of a detached run."""

from __future__ import annotations

import os

TYPE_CHECKING = False  # importing `typing` would slow the start
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Final

_PIECE: Final = 1024 * 1024


def read(
    cache: str, *, run: str, name: str, start: int = 0, count: int | None = None, inode: int | None = None
) -> Iterator[Any]:
    """Yields whether the file can be read, and then its content in pieces: `count` bytes from `start` on, or all.

    `name` is relative to the folder of the run. With `inode`, only if the log of this name still is that file.
    """
    folder = os.path.realpath(os.path.join(cache, "runs", os.path.basename(run)))
    path = os.path.realpath(os.path.join(folder, name))
    try:
        if not path.startswith(f"{folder}/"):
            raise FileNotFoundError(path)
        with open(path, "rb") as file:
            if inode is not None and os.stat(f"{folder}/logs/{os.path.basename(name)}").st_ino != inode:
                raise FileNotFoundError(path)
            yield True
            file.seek(start)
            rest = os.fstat(file.fileno()).st_size - start if count is None else count
            while rest > 0 and (piece := file.read(min(rest, _PIECE))):
                rest -= len(piece)
                yield None, piece
    except FileNotFoundError:
        yield False
