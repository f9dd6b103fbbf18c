"""`Source`: where hosts can come from, such as hostfiles or Slurm. The module of each kind has a `SOURCE`.

`Contents` is what a source has; `read_text` reads the files that list hosts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from skyfab.errors import InventoryError
from skyfab.inventory.host import Host


class Contents(NamedTuple):
    """What a source has."""

    hosts: dict[str, Host]
    groups: dict[str, tuple[str, ...]]
    left_out: dict[str, str]
    """What was skipped, by name, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What `detect` knows about a source."""

    word: str
    """What users write: ``slurm``, or ``hostfile:PATH``."""
    takes: Literal["path", "pattern", "nothing"]
    """What follows the word and a colon. A path must, a pattern may."""
    read: Callable[[str], Contents]
    """Reads what follows the word; empty if nothing does. Raises InventoryError."""

    def names(self, given: str) -> bool:
        """Whether these are words for this source, and not the path of a file."""
        word, colon, rest = given.partition(":")
        wanted = {"path": bool(rest), "pattern": True, "nothing": not colon}
        return word == self.word and wanted[self.takes]


def read_text(path: str | os.PathLike[str], *, strict: bool = True) -> str:
    """The text of a file. Raises InventoryError if the file is not readable, or not text.

    If not `strict`, bytes that are not UTF-8 are accepted, as in comments of files that other programs read.
    """
    name = os.fspath(path)
    try:
        text = Path(path).read_bytes().decode("utf-8-sig", "strict" if strict else "backslashreplace")
    except OSError as error:
        hint = "check the path; to create an inventory: skyfab init"
        raise InventoryError(f"{name}: {error.strerror}", hint=hint) from None
    except ValueError as error:  # not UTF-8, or a NUL in the path
        raise InventoryError(f"{name!r}: not a text file ({error})", hint="save it as UTF-8") from None
    if "\0" in text:
        raise InventoryError(f"{name}: not a text file (contains NUL bytes)", hint="check the path")
    return text


def lines_of(text: str) -> list[str]:
    """The lines of a text. Only line feeds end them, with or without carriage return: not all that Unicode has."""
    return [line.removesuffix("\r") for line in text.split("\n")]
