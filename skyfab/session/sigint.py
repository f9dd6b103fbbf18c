"""Defers Ctrl-C while the main thread changes state that a KeyboardInterrupt would leave inconsistent.

Python raises KeyboardInterrupt between any two bytecodes of the main thread, also between reading a reply and recording
that it was read. While pools are open, this module's SIGINT handler replaces the previous one. Inside
``with SIGINT_GUARD:`` it only records the signal; the previous handler runs at the end of the block, or in `allow`,
while the thread waits.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, TypeVar

T = TypeVar("T")

MAIN: Final = threading.main_thread().ident


class SigintGuard:
    """Wraps the program's own SIGINT handler while a pool is open. Blocks may be nested."""

    def __init__(self) -> None:
        self._depth = 0
        """How many blocks the main thread is inside. Only that thread changes it."""
        self.missed: tuple[int, FrameType | None] | None = None
        self._users = 0
        self._before: Any = None
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Installs the handler, if the program's own is a Python function. Only the main thread can do so."""
        with self._lock:
            self._users += 1
            if self._before is None and threading.get_ident() == MAIN:
                before = signal.getsignal(signal.SIGINT)
                if callable(before):
                    self._before = before
                    signal.signal(signal.SIGINT, self._handle)

    def leave(self) -> None:
        """The last user restores the previous handler, unless another one has been installed since."""
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
            self._depth = max(0, self._depth - 1)  # 0 already if an interrupt was raised as `allow` began
            if self.missed is not None and not self._depth:
                self._deliver()

    def allow(self, wait: Callable[[], T]) -> T:
        """Calls `wait` inside a block: until it returns, the main thread handles signals immediately."""
        if threading.get_ident() != MAIN:
            return wait()
        depth, self._depth = self._depth, 0
        try:
            self._deliver()
            return wait()
        finally:
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
