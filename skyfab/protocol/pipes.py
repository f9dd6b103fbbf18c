"""Enlarges the buffers of pipes, for fewer and larger reads and writes between processes of one machine."""

from __future__ import annotations

import contextlib
import fcntl

ROOM = 1024 * 1024
_F_SETPIPE_SZ = 1031


def widen(fd: int) -> None:
    """Enlarges the pipe's buffer where the system allows it. A descriptor that is not a pipe is left unchanged."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, _F_SETPIPE_SZ, ROOM)
