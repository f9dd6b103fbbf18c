"""Detects changes in a set of folders, with inotify. A check takes a microsecond.

On Linux inotify reports a change at the moment of the write. On other systems, and if inotify fails, it is not
`active`, and no change is detected.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import sys
import weakref
from collections.abc import Iterable
from typing import Final

_MODIFY, _ATTRIB, _FROM, _TO, _CREATE, _DELETE = 0x2, 0x4, 0x40, 0x80, 0x100, 0x200
_EVENTS: Final = _MODIFY | _ATTRIB | _FROM | _TO | _CREATE | _DELETE
_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC
_MOST: Final = 4096


class Changes:
    """Watches folders, not recursively: subfolders must be listed too."""

    def __init__(self) -> None:
        self._fd = -1
        self._folders: set[str] = set()

    def watch(self, folders: Iterable[str]) -> None:
        """Watches these folders, and no others, from now on."""
        wanted = set(folders)
        if wanted == self._folders and self._fd >= 0:
            return
        self.close()
        if sys.platform != "linux" or len(wanted) > _MOST:
            return
        libc = ctypes.CDLL(None)
        self._fd = libc.inotify_init1(_FLAGS)
        if self._fd < 0:
            return
        self._poll = select.epoll()  # unlike `poll`, it can be used by several threads at once
        self._poll.register(self._fd, select.EPOLLIN)
        self._ask = self._poll.poll
        self._closer = weakref.finalize(self, os.close, self._fd)
        for folder in wanted:
            if libc.inotify_add_watch(self._fd, os.fsencode(folder), _EVENTS) < 0:
                self.close()  # too many watches, or the folder is missing: changes could be missed
                return
        self._folders = wanted

    @property
    def active(self) -> bool:
        """inotify is in use."""
        return self._fd >= 0

    def changed(self) -> bool:
        """Whether something has changed since the last `forget`."""
        return self._fd >= 0 and bool(self._ask(0))

    def forget(self) -> None:
        """Called before the folders are read: only later changes count."""
        with contextlib.suppress(BlockingIOError):
            while self._fd >= 0 and os.read(self._fd, 65536):
                pass

    def close(self) -> None:
        if self._fd >= 0:
            self._closer()
            self._poll.close()
            self._fd = -1
            self._folders = set()
