"""Notes when each part of a log was written, in a file beside it, so that logs of several hosts can be merged by time.

A record of 32 bytes is an offset in the log and a time in milliseconds: what follows that offset was written then.
"""

from __future__ import annotations

import contextlib
import os
import time

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from typing import Final

_PACE: Final = 0.01
"""Seconds between records: a process that writes all the time does not make the file long."""


class LogTimes:
    """The times of one log. Errors are ignored: without them, the log is still there."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._last = -1.0
        self._file = self._open()

    def _open(self) -> int:
        with contextlib.suppress(OSError):
            return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return -1

    def note(self, offset: int) -> None:
        """What is written from this offset of the log on, is written now."""
        now = time.time()
        if not 0 <= now - self._last < _PACE:
            self._last = now
            with contextlib.suppress(OSError):
                os.write(self._file, b"%015d %015d\n" % (offset, round(now * 1000)))

    def turn_over(self) -> None:
        """The log was rotated."""
        with contextlib.suppress(OSError):
            os.rename(self._path, f"{self._path}.1")
        self.close()
        self._file = self._open()
        self._last = -1.0

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
