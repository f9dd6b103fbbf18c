"""Interrupts: Ctrl-C waits for the microseconds in which something would be lost by it.

Python raises KeyboardInterrupt between any two steps of the main thread: between reading an answer and noting that it
was read, too. While pools are open, their handler stands before the one that was there, and calls it a moment later
where that is needed.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Final

MAIN: Final = threading.main_thread().ident


class Interrupts:
    """Stands before the program's own handler of SIGINT while somebody needs it."""

    def __init__(self) -> None:
        self.held = False
        """The main thread is in the middle of something. Only that thread changes it."""
        self.missed: tuple[int, FrameType | None] | None = None
        self._users = 0
        self._before: Any = None
        self._lock = threading.Lock()

    def watch(self) -> None:
        """From now on, where the program has a handler in Python. Only the main thread may set one."""
        with self._lock:
            self._users += 1
            if self._before is None and threading.get_ident() == MAIN:
                before = signal.getsignal(signal.SIGINT)
                if callable(before):
                    self._before = before
                    signal.signal(signal.SIGINT, self._handle)

    def leave(self) -> None:
        """The last one who needed it puts the old handler back, unless somebody else has set another since."""
        with self._lock:
            self._users -= 1
            if not self._users and self._before is not None and threading.get_ident() == MAIN:
                if signal.getsignal(signal.SIGINT) == self._handle:
                    signal.signal(signal.SIGINT, self._before)
                self._before = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.held:
            self.missed = (number, frame)
        elif self._before is not None:
            self._before(number, frame)

    def go_on(self) -> None:
        """What came meanwhile happens now."""
        missed, self.missed = self.missed, None
        if missed is not None and self._before is not None:
            self._before(*missed)


INTERRUPTS: Final = Interrupts()
