"""Lists the logs of a detached run."""

from __future__ import annotations

import os


def logs(cache: str, *, run: str) -> list[list[str | int]]:
    """For each log its name, its inode number, its size, and the size of the file that says when it was written."""
    folder = os.path.join(cache, "runs", os.path.basename(run))
    found: list[list[str | int]] = []
    try:
        names = sorted(os.listdir(f"{folder}/logs"))
    except OSError:
        return []
    for name in names:
        try:
            log = os.stat(f"{folder}/logs/{name}")
        except OSError:  # the log was rotated just now
            continue
        try:
            times = os.stat(f"{folder}/times/{name}").st_size
        except OSError:
            times = 0
        found.append([name, log.st_ino, log.st_size, times])
    return found
