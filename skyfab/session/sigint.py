"""Interrupts: defers Ctrl-C while the main thread changes state that a KeyboardInterrupt would leave half changed.

Python raises KeyboardInterrupt between any two steps of the main thread: between reading an answer and noting that it
was read, too. While pools are open, their handler stands before the one that was there. Inside ``with SIGINT_GUARD:``
it notes the signal; the handler before it runs at the end of the block, or in `pause`, where the thread waits.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Final

MAIN: Final = threading.main_thread().ident


class SigintGuard:
    """Stands before the program's own handler of SIGINT while a pool is open. Blocks may be nested."""

    def __init__(self) -> None:
        self._depth = 0
        """How many blocks the main thread is in. Only that thread changes it."""
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

    def __enter__(self) -> None:
        if threading.get_ident() == MAIN:
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == MAIN:
            self._depth = max(0, self._depth - 1)  # an interrupt that `pause` let through has left no block behind
            if self.missed is not None and not self._depth:
                self._deliver()

    def pause(self) -> int:
        """Main thread only, for a wait inside a block: until `resume`, a signal has its effect at once."""
        depth, self._depth = self._depth, 0
        if self.missed is not None:
            self._deliver()
        return depth

    def resume(self, depth: int) -> None:
        """The wait is over; `depth` is what `pause` returned."""
        self._depth = depth

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._depth:
            self.missed = (number, frame)
        elif self._before is not None:
            self._before(number, frame)

    def _deliver(self) -> None:
        missed, self.missed = self.missed, None
        if missed is not None and self._before is not None:
            self._before(*missed)


SIGINT_GUARD: Final = SigintGuard()
