"""skyfab's cache folder on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder for locks, wheels, tools and what is known about hosts: $XDG_CACHE_HOME/skyfab."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "skyfab"
