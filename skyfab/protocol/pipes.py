"""Pipes with room: fewer, larger reads and writes between processes of one machine."""

from __future__ import annotations

import contextlib
import fcntl

ROOM = 1024 * 1024
_F_SETPIPE_SZ = 1031


def widen(fd: int) -> None:
    """Lets the pipe hold more, where the system allows it; anything that is no pipe is left alone."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, _F_SETPIPE_SZ, ROOM)
