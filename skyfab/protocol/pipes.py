"""Enlarges the buffers of pipes, for fewer and larger reads and writes between processes of one machine."""

from __future__ import annotations

import contextlib
import errno
import fcntl

TYPE_CHECKING = False  # see frames.py
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from skyfab.protocol.frames import Buffer

ROOM = 1024 * 1024
_F_SETPIPE_SZ = 1031
_LENT = 64 * 1024
"""Buffers of at least this size are lent to the pipe; copying smaller ones takes less time than that."""
_NONBLOCK = 2  # SPLICE_F_NONBLOCK


def widen(fd: int) -> None:
    """Enlarges the pipe's buffer where the system allows it. A descriptor that is not a pipe is left unchanged."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, _F_SETPIPE_SZ, ROOM)


class Lender:
    """Writes to a pipe as the stream's `send` does, but lends it large buffers instead of copying them (vmsplice).

    What reads from the pipe reads from their memory: they must not change until the other side has received them.
    """

    def __init__(self, stream: Any, sink: Callable[[], int | None]) -> None:
        self._stream = stream
        self._sink = sink
        self._fd: int | None = -1
        self._splice: Any = None

    def __call__(self, buffers: Sequence[Buffer]) -> int:
        small = next((at for at, buffer in enumerate(buffers) if len(buffer) >= _LENT), len(buffers))
        if small or self._fd is None:
            return int(self._stream.send(buffers[: small or None]))
        import ctypes  # only for large buffers: importing it would slow an agent's start

        if self._splice is None:
            self._splice = getattr(ctypes.CDLL(None, use_errno=True), "vmsplice", lambda *_: -1)
            self._fd = self._sink()
        view = (ctypes.c_void_p * 11)()  # a Py_buffer: the address is its first field, the size its third
        ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(buffers[0]), view, 0)
        piece = (ctypes.c_size_t * 2)(view[0] or 0, view[2] or 0)
        sent = self._splice(-1 if self._fd is None else self._fd, piece, ctypes.c_size_t(1), _NONBLOCK)
        ctypes.pythonapi.PyBuffer_Release(view)
        if sent >= 0:
            return int(sent)
        if ctypes.get_errno() == errno.EAGAIN:
            raise BlockingIOError
        self._fd = None  # not a pipe, or not a system that can do this
        return int(self._stream.send(buffers))
