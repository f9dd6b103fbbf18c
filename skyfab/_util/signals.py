"""Defers signal handlers while the main thread changes state that an exception would leave inconsistent.

Python runs signal handlers between any two bytecodes of the main thread, also between reading a reply and recording
that it was read. A handler may raise, as that of Ctrl-C does, or make a call itself, which would wait for a lock that
its own thread holds. While pools are open, this module wraps the program's handlers. Inside ``with SIGNAL_GUARD:`` a
signal is only recorded; its handler runs at the end of the block, or in `allow`, while the thread waits.
"""

from __future__ import annotations

import _thread
import functools
import os
import signal
import threading
import time
import traceback
import weakref
from _signal import getsignal  # type: ignore[import-not-found]  # without enums: 15 times as fast
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any, Final, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Handler = Callable[[int, FrameType | None], Any]

_SIGNALS: Final = sorted(number for number in signal.valid_signals() if number < 32)
"""Not the real-time signals, which few programs use and macOS lacks: every call looks at the handlers of all these."""

NAP: Final = 0.25
"""Seconds after which a wait of the main thread begins again. A thread that starts a program may receive a signal that
was meant for the main thread, which then does not wake up for its handler."""

_SOON: Final = 0.001
"""Seconds after which a signal comes again whose handler must not raise."""
_marked: Final[set[CodeType]] = set()
"""The functions that `without_signals` has marked."""


class SignalCame(BaseException):
    """Ends a wait in `SignalGuard.poll`."""


class SignalGuard:
    """Wraps the program's own signal handlers while a pool is open. Blocks may be nested."""

    def __init__(self) -> None:
        self.main = threading.main_thread().ident
        """The thread that runs signal handlers."""
        self._depth = 0
        """How many blocks the main thread is inside. Only that thread changes it."""
        self._missed: dict[int, tuple[Handler, FrameType | None]] = {}
        """The signals that came inside a block, each with its handler."""
        self._is_polling = False
        self.held: list[Any] = []
        """While it has an item, signals wait as in functions that are marked with `without_signals`."""
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
            if self._users or threading.get_ident() != self.main:
                return
        for number in _SIGNALS:
            handler = getsignal(number)
            if isinstance(handler, _Deferred) and handler.guard is self:
                signal.signal(number, handler.handler)

    def wrap(self) -> None:
        """Wraps the handlers that are Python functions, also those installed since. Only the main thread can do so."""
        if threading.get_ident() != self.main or not self._users:
            return
        found = list(map(getsignal, _SIGNALS))
        if found == self._seen:
            return
        for number, handler in zip(_SIGNALS, found, strict=True):
            if callable(handler) and not isinstance(handler, _Deferred):
                signal.signal(number, _Deferred(self, handler))
        self._seen = list(map(getsignal, _SIGNALS))

    def __enter__(self) -> None:
        if threading.get_ident() == self.main:
            self._depth += 1

    def enter(self) -> None:
        """Enters a block; if it is the outermost one, after `wrap`."""
        if threading.get_ident() == self.main:
            if not self._depth:
                self.wrap()
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == self.main:
            self._depth -= 1
            if self._missed and not self._depth:
                self._deliver()

    def allow(self, wait: Callable[..., T], *arguments: Any) -> T:
        """Calls `wait` inside a block: until it returns, the main thread handles signals immediately."""
        if threading.get_ident() != self.main:
            return wait(*arguments)
        depth = self._depth
        try:
            self._depth = 0
            if self._missed:
                self._deliver()
            return wait(*arguments)
        finally:
            self._depth = depth

    def acquire(self, lock: Any, timeout: float = float("inf")) -> bool:
        """Waits for a lock inside a block. The main thread handles signals meanwhile."""
        if threading.get_ident() != self.main:
            return bool(lock.acquire(True, -1 if timeout == float("inf") else timeout))
        if lock.acquire(False):
            return True
        deadline = time.monotonic() + timeout
        while not self.allow(lock.acquire, True, max(0, min(NAP, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return False
        return True

    def poll(self, wait: Callable[..., T], *arguments: Any) -> T:
        """As `allow`, with a lock that a handler may need: raises SignalCame, and the handler runs in the next `allow`.

        Nothing may be lost if that is raised as `wait` returns.
        """
        if threading.get_ident() != self.main:
            return wait(*arguments)
        try:
            self._is_polling = True
            if self._missed:
                raise SignalCame
            return wait(*arguments)
        finally:
            self._is_polling = False

    def handle(self, handler: Handler, number: int, frame: FrameType | None) -> None:
        """A signal came."""
        if self.held or any(found.f_code in _marked for found, _ in traceback.walk_stack(frame) if frame):
            try:
                _thread.start_new_thread(_send_again, (number,))
            except RuntimeError:  # no more threads: it is delivered at the end of the next block
                self._missed[number] = (handler, frame)
            return
        if not self._depth:
            handler(number, frame)
            return
        self._missed[number] = (handler, frame)
        if self._is_polling:
            raise SignalCame

    def forked(self) -> None:
        """This is a child process. If another thread forked it, that is the main thread now, and outside all blocks."""
        if threading.get_ident() != self.main:
            self.main = threading.get_ident()
            self._depth, self._is_polling = 0, False
            self._missed.clear()

    def _deliver(self) -> None:
        while self._missed:  # what one that raises leaves is delivered at the end of the next block
            number = next(iter(self._missed))
            handler, frame = self._missed.pop(number)
            self.handle(handler, number, frame)


def without_signals(function: F) -> F:
    """Marks a function for whose end signals wait: what a handler raises in it would be lost, or end the process."""
    _marked.add(function.__code__)
    return function


_WEAK: Final[Sequence[Any]] = (weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
for _kind in _WEAK:
    without_signals(_kind()._remove)  # noqa: SLF001 - what is called when an item of such a collection is dropped


def _send_again(number: int) -> None:
    time.sleep(_SOON)
    if callable(getsignal(number)):  # else the program has removed its handler, and the signal would end it
        signal.pthread_kill(SIGNAL_GUARD.main, number)  # type: ignore[arg-type]


class _Deferred:
    """The handler of one signal. Each has its own function: a program may restore one that it has replaced."""

    def __init__(self, guard: SignalGuard, handler: Handler) -> None:
        self.guard = guard
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.guard.handle(self.handler, number, frame)


SIGNAL_GUARD: Final = SignalGuard()
os.register_at_fork(after_in_child=SIGNAL_GUARD.forked)


def is_from_handler(error: BaseException) -> bool:
    """Whether a signal handler of the program raised it, and not the code that it interrupted."""
    return any(frame.f_code is SignalGuard.handle.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


class GuardedCondition:
    """A condition whose lock the main thread holds only in a block of SIGNAL_GUARD; handlers run while it waits.

    One of Python's own stays locked if a handler raises in one of its methods: then others wait forever.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: list[threading.Lock] = []

    def acquire(self) -> None:
        SIGNAL_GUARD.enter()
        self._lock.acquire()

    def release(self, *_: object) -> None:
        self._lock.release()
        SIGNAL_GUARD.__exit__()

    __enter__, __exit__ = acquire, release

    def wait(self, timeout: float | None = None) -> bool:
        waiting = threading.Lock()
        waiting.acquire()
        self._waiting.append(waiting)
        self._lock.release()
        try:
            return SIGNAL_GUARD.acquire(waiting, float("inf") if timeout is None else max(0, timeout))
        finally:
            self._lock.acquire()
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def notify_all(self) -> None:
        while self._waiting:
            self._waiting.pop().release()


class GuardedFuture(Future[Any]):
    """A future that threads of ours resolve: a handler that raises in a wait for it cannot stop them."""

    def __init__(self) -> None:
        super().__init__()
        self._condition: Any = GuardedCondition()
        self._waiters: list[Any] = _Waiters()

    def cancelled(self) -> bool:
        """As in the base class, which takes the lock to read one attribute."""
        return self._state in (CANCELLED, CANCELLED_AND_NOTIFIED)

    def done(self) -> bool:
        return self._state in (CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED)

    def result(self, timeout: float | None = None) -> Any:
        """As in the base class, which takes an exception that is false, such as one with a length of 0, for none."""
        error = Future.exception(self, timeout)
        try:
            if error is not None:
                raise error
            return self._result
        finally:
            del error, self  # else they and the frames of the exception would refer to each other

    def __await__(self) -> Generator[Any, None, Any]:
        """``await (f(x) > compute)``: the event loop keeps running. Cancelling the task cancels the call."""
        return self._outcome().__await__()

    async def _outcome(self) -> Any:
        """A coroutine: Python replaces a StopIteration of the call, which no future of asyncio can have."""
        import asyncio

        try:
            await called(functools.partial(Future.add_done_callback, self))
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self.cancelled():
            raise asyncio.CancelledError
        return self.result()


async def called(register: Callable[[Callable[..., object]], object]) -> None:
    """Waits in a coroutine until the function that `register` is given is called, on any thread."""
    import asyncio

    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def call(*_: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(event.set)

    register(call)
    await event.wait()


class _Waiters(list[Any]):
    """Those of `concurrent.futures.wait` and `as_completed`, which are notified in the same way."""

    def append(self, waiter: Any) -> None:
        vars(waiter.event)["_cond"] = GuardedCondition()
        super().append(waiter)
