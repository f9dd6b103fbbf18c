"""Processes that workers have started: how to find them, and how to end them.

Everything that runs below a worker is killed when the worker ends. What deletes the shared memory and semaphores of
other processes after their end is spared for that long: else these would stay in the memory of the host.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Final

SUBREAPER: Final = 36
"""The option of `prctl` that makes a process the parent of orphaned descendants."""
_TRACKERS: Final = (b"resource_tracker", b"torch_shm_manager")
"""Words in the command lines of trackers: those of multiprocessing, of joblib and of torch."""
_TRACKING: Final = 2.0
"""Seconds that a tracker has, after all others were killed."""
_BEGINNING: Final = 0.1
"""Seconds in which a program has its variables and command line."""
_PAUSE: Final = 0.002


def prctl(option: int, value: int) -> None:
    """Changes a setting of this process, on Linux."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value)


def offspring() -> list[int]:
    """The pids of our children, zombies included. They cannot be reused before we reap them."""
    return _children(os.getpid())


def _children(pid: int) -> list[int]:
    """Those of all threads of a process; none if this is not Linux, or a kernel that does not list them."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:  # also if it has ended
        return []
    return [int(word) for thread in threads for word in _now(pid, f"task/{thread}/children").split()]


def has_variable(pid: int, *words: str) -> bool:
    """Whether a process was started with one of these variables. False for one that has ended."""
    found = _read(pid, "environ").split(b"\0")
    return any(os.fsencode(word) in found for word in words)


def _read(pid: int, what: str) -> bytes:
    """A file of a process, empty if that has ended."""
    found, until = _now(pid, what), time.monotonic() + _BEGINNING
    while not found and _begins(pid) and time.monotonic() < until:
        time.sleep(_PAUSE)
        found = _now(pid, what)
    return found


def _begins(pid: int) -> bool:
    """Whether it has just begun to run another program. For a moment, such a process shows nothing of itself."""
    state = _now(pid, "stat").rpartition(b") ")[2][:1]
    return state not in (b"", b"Z", b"X") and not _now(pid, "cmdline")


def _now(pid: int, what: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{what}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _is_tracker(pid: int) -> bool:
    """Whether it deletes shared memory after the end of those who use it. False for one that has ended."""
    line = _read(pid, "cmdline")
    return any(word in line for word in _TRACKERS)


def send(pids: Iterable[int], number: int) -> None:
    """Sends a signal to processes."""
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            os.kill(pid, number)


def send_groups(groups: Iterable[int], number: int) -> None:
    """Sends a signal to process groups, or to one process if it leads none."""
    for pid in groups:
        try:
            os.killpg(pid, number)
        except OSError:  # it has just been forked
            send([pid], number)


def kill(pids: Sequence[int], group: int | None = None) -> None:
    """Kills processes with all that they have started, and what is left of a process group.

    If trackers are among these, everything else is killed, one process after another.
    """
    found, listed = list(pids), 0
    while listed < len(found):
        found += _children(found[listed])
        listed += 1
    others = [pid for pid in found if not _is_tracker(pid)]
    if len(others) < len(found):
        send(others, signal.SIGKILL)
        return
    if group is not None:
        with contextlib.suppress(OSError):  # nothing is left
            os.killpg(group, signal.SIGKILL)
    send_groups(pids, signal.SIGKILL)


def end_children() -> None:
    """Kills and reaps until no child is left. Orphaned descendants become our children."""
    end_strays(lambda pid: True)
    with contextlib.suppress(ChildProcessError):
        while True:  # on systems that do not list them
            os.waitpid(-1, 0)


def end_strays(which: Callable[[int], bool], group: int | None = None) -> None:
    """Kills and reaps the children `which` fits, and kills what is left of a process group."""
    until = time.monotonic() + _TRACKING
    left = set(filter(which, offspring()))
    kill([*left], group)
    while left := left.union(filter(which, offspring())):  # one that has ended no longer shows its variables
        is_late = time.monotonic() > until
        send([pid for pid in left if is_late or not _is_tracker(pid)], signal.SIGKILL)
        reaped = set(filter(_is_reaped, left))
        left -= reaped
        if not reaped:
            time.sleep(_PAUSE)


def _is_reaped(pid: int) -> bool:
    """Reaps a child if it has ended."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:  # another thread has done so
        return True
