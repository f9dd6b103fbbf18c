"""A note on this machine of the runs that were started here: shells complete their names without asking hosts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from skyfab._util.cache import cache_folder

_MOST: Final = 50


def _file() -> Path:
    return cache_folder() / "launched"


def note(id_: str, name: str) -> None:
    """Notes a run. Ignores a disk that is full or read-only."""
    from skyfab._util import atomic  # it takes long to import, and completion does not need it

    with suppress(OSError, RuntimeError):
        lines = [*_lines(), f"{id_[:8]} {' '.join(name.split())}"]
        atomic.write(_file(), "\n".join(lines[-_MOST:]) + "\n")


def names() -> list[str]:
    """Ids and names of the runs, the latest first."""
    found = [word for line in reversed(_lines()) for word in line.split(" ", 1)]
    return [word for word in dict.fromkeys(found) if word and word.isprintable()]


def _lines() -> list[str]:
    try:
        return _file().read_text(errors="replace").splitlines()
    except (OSError, RuntimeError):
        return []
