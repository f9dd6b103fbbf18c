"""Lists the sources of hosts, and detects which of them a word or a file is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from skyfab.inventory import ansible, file, hostfile, slurm, ssh_config
from skyfab.inventory.host import expanded
from skyfab.inventory.source import Contents, Source, read_text

_SOURCES: Final[tuple[Source, ...]] = (
    file.SOURCE,
    ansible.SOURCE,
    slurm.SOURCE,
    ssh_config.SOURCE,
    hostfile.SOURCE,  # the last one: a list of names is a hostfile
)
"""In the order in which a file is compared with them."""


def is_word(given: str) -> bool:
    """Whether this is the word of a source, and not the path of a file."""
    return any(source.names(given) for source in _SOURCES)


def read(given: str | os.PathLike[str]) -> Contents:
    """The hosts of a source: its word, or the path of a file. Raises InventoryError."""
    for source in _SOURCES:
        if isinstance(given, str) and source.names(given):
            rest = given.partition(":")[2]
            return source.read(str(expanded(rest)) if source.takes == "path" else rest)
    return source_of(Path(given)).read(os.fspath(given))


def source_of(path: Path) -> Source:
    """The source that a file is of. Raises InventoryError if it is not readable, or ambiguous."""
    text = "" if path.is_dir() else read_text(path, hint="check the path; to create an inventory: skyfab init")
    return next(source for source in _SOURCES if source.matches(path, text))
