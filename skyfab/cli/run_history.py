"""A note on this machine of the runs that were started here: shells complete their names without asking hosts."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

_MOST: Final = 50


def _file() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")  # as skyfab.env.uv.home, which takes long to import
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "skyfab" / "launched"


def note(id_: str, name: str) -> None:
    """Notes a run. What cannot be written is not noted."""
    with suppress(OSError, RuntimeError):
        file = _file()
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = file.with_name(f".launched-{os.getpid()}")
        draft.write_text("\n".join([*_lines(), f"{id_[:8]} {' '.join(name.split())}"][-_MOST:]) + "\n")
        draft.replace(file)


def names() -> list[str]:
    """Ids and names of the runs, the latest first."""
    found = [word for line in reversed(_lines()) for word in line.split(" ", 1)]
    return [word for word in dict.fromkeys(found) if word and word.isprintable()]


def _lines() -> list[str]:
    try:
        return _file().read_text(errors="replace").splitlines()
    except (OSError, RuntimeError):
        return []
