"""`Source`: a kind of place that hosts come from, such as hostfiles or Slurm. Each module of one has a `SOURCE`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

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
    matches: Callable[[Path, str], bool] = lambda path, text: False
    """Whether a file, given without a word, is of this kind, by its path and text; a folder has no text."""

    def names(self, given: str) -> bool:
        """Whether these are words for this source, and not the path of a file."""
        word, colon, rest = given.partition(":")
        wanted = {"path": bool(rest), "pattern": True, "nothing": not colon}
        return word == self.word and wanted[self.takes]
