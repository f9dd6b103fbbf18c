"""Removes run folders whose agent no longer runs, for example after a power failure; done when a new pool starts."""

from __future__ import annotations

import os

_YOUNG = 60.0
"""Seconds for which a new folder may have no agent yet."""


def remove_dead(own: str) -> None:
    """Removes the run folders beside `own` whose agents no longer run. `own` must be the current directory."""
    place, now = os.path.dirname(own), os.stat(own).st_mtime  # by the clock of the file system, which may be remote
    for name in os.listdir(place):
        folder = os.path.join("..", name)  # relative, because the length of socket paths is limited
        try:
            old = os.stat(folder).st_mtime < now - _YOUNG
            if name != os.path.basename(own) and old and is_dead(folder):
                import shutil

                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # another process uses or removes it


def is_dead(folder: str) -> bool:
    """Whether no agent listens in the folder and no link is about to start one.

    Raises OSError if a link holds the folder's lock.
    """
    import contextlib
    import fcntl
    import socket

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(FileNotFoundError):
            lock = stack.enter_context(open(os.path.join(folder, "lock"), "r+"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        client = stack.enter_context(socket.socket(socket.AF_UNIX))
        client.setblocking(False)  # one that hangs does not accept connections, and its queue may be full
        try:
            client.connect(os.path.join(folder, "agent.sock"))
        except (FileNotFoundError, ConnectionRefusedError):
            return True
        except BlockingIOError:
            return False
    return False
