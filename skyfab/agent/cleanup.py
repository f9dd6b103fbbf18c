"""The sweep: run folders whose agent is no more, because the host lost power, go when the next pool comes."""

from __future__ import annotations

import os

_YOUNG = 60.0
"""Seconds in which a folder may have no agent yet."""


def sweep(own: str) -> None:
    """Removes what the dead have left beside our run folder, which is the current one."""
    place, now = os.path.dirname(own), os.stat(own).st_mtime  # by the clock of whoever keeps the files
    for name in os.listdir(place):
        folder = os.path.join("..", name)  # relative: the path of a socket must be short
        try:
            old = os.stat(folder).st_mtime < now - _YOUNG
            if name != os.path.basename(own) and old and _is_dead(folder):
                import shutil

                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # somebody else is at it


def _is_dead(folder: str) -> bool:
    """Nobody is about to start there, and nobody listens."""
    import fcntl
    import socket

    with open(os.path.join(folder, "lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(os.path.join(folder, "agent.sock"))
            except (FileNotFoundError, ConnectionRefusedError):
                return True
    return False
