"""skyfab's cache folder on this machine."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def cache_folder() -> Path:
    """The folder for locks, wheels, tools and what is known about hosts: $XDG_CACHE_HOME/skyfab."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "skyfab"


def made_cache() -> Path:
    """Creates the cache folder so that only this user can write to it, which hosts require, and returns it.

    Also mends one that others can write to. Never raises: if it cannot be created, using it raises.
    """
    folder = cache_folder()
    with suppress(OSError):
        for each in (*reversed(folder.parents), folder):
            each.mkdir(mode=0o700, exist_ok=True)
        found = folder.stat()
        if found.st_mode & 0o022 and found.st_uid == os.getuid():  # made with a umask of 002
            folder.chmod(0o700)
    return folder
