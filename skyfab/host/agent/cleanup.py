"""Removes run folders whose agent no longer runs, for example after a power failure; done when a new pool starts.

Whether an agent listens at a socket is only known on its own machine. Others that share the folder may have the same
host name: an agent notes the boot of its machine, and touches its folder regularly.
"""

from __future__ import annotations

import os
import time

from skyfab.host.agent.host_info import boot_id

_YOUNG = 60.0
"""Seconds for which a new folder may have no agent yet."""
_SILENT = 1800.0
"""Seconds without a touch after which the agent of another boot no longer runs, on this machine or another one."""
_PACE = 300.0
"""Seconds between touches."""


class Presence:
    """Shows others that the agent of a run folder runs."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.due = 0.0
        """When the folder is to be touched."""
        try:
            with open(os.path.join(folder, "boot"), "w") as file:
                file.write(boot_id())
        except OSError:  # the disk is full: the boot is unknown
            pass

    def renew(self) -> None:
        """Touches the folder, if that is due."""
        if time.monotonic() < self.due:
            return
        self.due = time.monotonic() + _PACE
        try:
            os.utime(self._folder)
        except OSError:  # it has been removed
            pass


def remove_dead(own: str) -> None:
    """Removes the run folders beside `own` whose agents no longer run. `own` must be the current directory.

    On a thread: large folders take longer than an agent may be silent.
    """
    dead = []
    place, now = os.path.dirname(own), os.stat(own).st_mtime  # by the clock of the file system, which may be remote
    for name in os.listdir(place):
        folder = os.path.join("..", name)  # relative, because the length of socket paths is limited
        try:
            age = now - os.stat(folder).st_mtime
            is_old = age > (_YOUNG if _is_of_this_boot(folder) else _SILENT)
            if name != os.path.basename(own) and is_old and is_dead(folder):
                dead.append(os.path.join(place, name))
        except OSError:
            continue  # another process uses or removes it
    if dead:
        import contextlib
        from threading import Thread  # imported late: few agents need it

        with contextlib.suppress(RuntimeError):  # this machine lacks threads: the next agent removes them
            Thread(target=_remove, args=dead, daemon=True).start()


def _remove(*folders: str) -> None:
    import shutil

    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _is_of_this_boot(folder: str) -> bool:
    """Whether its agent was started on this machine, and since it was booted."""
    try:
        with open(os.path.join(folder, "boot")) as file:
            return file.read() == boot_id() != "?"
    except FileNotFoundError:
        return False


def is_dead(folder: str) -> bool:
    """Whether no agent of this machine listens in the folder and no link is about to start one.

    For a folder that agents of other machines may use, this says nothing. Raises OSError if a link holds the folder's
    lock.
    """
    import contextlib
    import errno
    import fcntl
    import socket

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(FileNotFoundError):
            lock = stack.enter_context(open(os.path.join(folder, "lock"), "r+"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):  # others: a file system without locks
                    raise
        client = stack.enter_context(socket.socket(socket.AF_UNIX))
        client.setblocking(False)  # one that hangs does not accept connections, and its queue may be full
        try:
            client.connect(os.path.join(folder, "agent.sock"))
        except (FileNotFoundError, ConnectionRefusedError):
            return True
        except BlockingIOError:
            return False
    return False
