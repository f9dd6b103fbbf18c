"""Defers signal handlers while the main thread changes state that an exception would leave inconsistent.

Python runs signal handlers between any two bytecodes of the main thread, also between reading a reply and recording
that it was read. A handler may raise, as that of Ctrl-C does, or make a call itself, which would wait for a lock that
its own thread holds. While pools are open, this module wraps the program's handlers. Inside ``with SIGNAL_GUARD:`` a
signal is only recorded; its handler runs at the end of the block, or in `allow`, while the thread waits.
"""

from __future__ import annotations

import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # without enums: 15 times as fast
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, TypeVar

T = TypeVar("T")
Handler = Callable[[int, FrameType | None], Any]

MAIN: Final = threading.main_thread().ident
_SIGNALS: Final = sorted(number for number in signal.valid_signals() if number < 32)
"""Not the real-time signals, which few programs use and macOS lacks: every call looks at the handlers of all these."""


class HandlerRan(BaseException):
    """Ends a wait for which a lock was lent: a signal handler has run without that lock."""


class SignalGuard:
    """Wraps the program's own signal handlers while a pool is open. Blocks may be nested."""

    def __init__(self) -> None:
        self._depth = 0
        """How many blocks the main thread is inside. Only that thread changes it."""
        self._missed: dict[int, tuple[Handler, FrameType | None]] = {}
        """The signals that came inside a block, each with its handler."""
        self._lent: threading.Lock | None = None
        """Released before a handler runs: see `lend`."""
        self._users = 0
        self._seen: list[Any] = []
        """The handlers of all signals, as they were when last wrapped."""
        self._lock = threading.RLock()  # reentrant: a handler may open or close a pool

    def watch(self) -> None:
        """A pool is opened."""
        with self._lock:
            self._users += 1
        self.wrap()

    def leave(self) -> None:
        """A pool is closed: the last one restores the program's handlers. Only the main thread can do so."""
        with self._lock:
            self._users -= 1
            if self._users or threading.get_ident() != MAIN:
                return
        for number in _SIGNALS:
            handler = getsignal(number)
            if isinstance(handler, _Deferred):
                signal.signal(number, handler.handler)

    def wrap(self) -> None:
        """Wraps the handlers that are Python functions, also those installed since. Only the main thread can do so."""
        if threading.get_ident() != MAIN or not self._users:
            return
        found = list(map(getsignal, _SIGNALS))
        if found == self._seen:
            return
        for number, handler in zip(_SIGNALS, found, strict=True):
            if callable(handler) and not isinstance(handler, _Deferred):
                signal.signal(number, _Deferred(self, handler))
        self._seen = list(map(getsignal, _SIGNALS))

    def __enter__(self) -> None:
        if threading.get_ident() == MAIN:
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == MAIN:
            self._depth = max(0, self._depth - 1)  # 0 already if a handler raised as `allow` began
            if self._missed and not self._depth:
                self._deliver()

    def allow(self, wait: Callable[..., T], *arguments: float) -> T:
        """Calls `wait` inside a block: until it returns, the main thread handles signals immediately."""
        if threading.get_ident() != MAIN:
            return wait(*arguments)
        depth, self._depth = self._depth, 0
        try:
            if self._missed:
                self._deliver()
            return wait(*arguments)
        finally:
            self._depth = depth

    def lend(self, lock: threading.Lock) -> None:
        """The main thread holds this lock while it waits in `allow`. A handler that runs there may need what it locks.

        Then the lock is released, and `allow` raises HandlerRan after the handler.
        """
        if threading.get_ident() == MAIN:
            self._lent = lock

    def release(self, lock: threading.Lock) -> None:
        """Releases a lock that was lent, unless that was done for a handler."""
        lent = self._lent
        if threading.get_ident() == MAIN:
            self._lent = None
            if lent is None:
                return
        lock.release()

    def handle(self, handler: Handler, number: int, frame: FrameType | None) -> None:
        """A signal came."""
        lent = self._lent
        if self._depth:
            self._missed[number] = (handler, frame)
        elif lent is None:
            handler(number, frame)
        else:
            self._lent = None
            lent.release()
            handler(number, frame)
            raise HandlerRan

    def _deliver(self) -> None:
        while self._missed:  # what one that raises leaves is delivered at the end of the next block
            number = next(iter(self._missed))
            handler, frame = self._missed.pop(number)
            self.handle(handler, number, frame)


class _Deferred:
    """The handler of one signal. Each has its own function: a program may restore one that it has replaced."""

    def __init__(self, guard: SignalGuard, handler: Handler) -> None:
        self._guard = guard
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._guard.handle(self.handler, number, frame)


SIGNAL_GUARD: Final = SignalGuard()
