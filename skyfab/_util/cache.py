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
    """The cache folder, after it was created, and closed to others: hosts, this one included, refuse it otherwise.

    Never raises: what is done in the folder does, if it cannot be created.
    """
    folder = cache_folder()
    with suppress(OSError):
        for each in (*reversed(folder.parents), folder):
            each.mkdir(mode=0o700, exist_ok=True)
        found = folder.stat()
        if found.st_mode & 0o022 and found.st_uid == os.getuid():  # made with a umask of 002
            folder.chmod(0o700)
    return folder
