"""SharedReader: reads all connections of a pool, and runs what follows from what was read.

A thread of its own reads. A caller that waits for a reply reads in its place, which saves two thread switches; the
thread pauses while callers come one after another.

Invariants: one thread reads at a time. While there are connections, one reads or does so after `_REST`. An action that
raises does not keep others from running. Actions never wait for a host. Descriptors are watched and unwatched from any
thread, and unwatched before they are closed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from skyfab._util.signals import NAP, SIGNAL_GUARD, SignalCame
from skyfab.errors import UsageError

if sys.platform == "linux":  # calls wait for what `selectors` adds to it
    from select import EPOLLIN as _READABLE
    from select import EPOLLOUT as _WRITABLE
    from select import epoll as _Selector
else:
    from selectors import EVENT_READ as _READABLE
    from selectors import EVENT_WRITE as _WRITABLE
    from selectors import DefaultSelector

    class _Selector(DefaultSelector):
        def poll(self, seconds: float) -> list[tuple[int, int]]:
            return [(key.fd, events) for key, events in self.select(seconds)]


Action = Callable[[], None]

_NAP: Final = 0.05
"""Seconds between checks of a condition that may change without a reply."""
_RETRY: Final = 0.002
"""Seconds between write attempts on a stream that has no descriptor to poll for writability."""

_REST: Final = 0.005
"""Seconds for which the thread leaves reading to callers after one of them has received its reply."""

_handling: Final[set[int]] = set()
"""The ids of threads that handle what was read."""


def is_handling() -> bool:
    """Whether this thread handles what was read: what it would wait for could not be read."""
    return threading.get_ident() in _handling


def refuse_to_wait() -> None:
    """Raises UsageError on a thread that handles what was read."""
    if is_handling():
        raise UsageError(
            "a callback cannot wait for a call: its thread is the one that reads replies",
            hint="start a thread for it, or use compute.submit(call) and its add_done_callback",
        )


class Awaited(Protocol):
    """A reply for which a thread waits."""

    @property
    def is_there(self) -> bool:
        """It was received, or never will be."""

    def block(self) -> None:
        """Waits for it; another thread reads."""


class Readable(Protocol):
    """The reader's view of a connection. Each method returns actions to run without any lock."""

    @property
    def interval(self) -> float:
        """Seconds between calls of `on_tick`."""

    def on_ready(self, fd: int) -> Sequence[Action]:
        """A watched descriptor is ready."""

    def on_wake(self) -> Sequence[Action]:
        """Called after `wake`."""

    def on_tick(self, now: float) -> Sequence[Action]:
        """Called periodically."""

    def on_error(self, error: BaseException) -> Sequence[Action]:
        """One of the other methods has raised. Other connections are not affected."""


class SharedReader:
    """Reads any number of connections. It has a thread and descriptors only while there are connections."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a signal handler may cancel a call, which calls `poke`
        """Protects the attributes below, except queues that change in one atomic operation."""
        self._reading = threading.Lock()
        """Held by the thread that reads."""
        self._waits: dict[threading.Lock, Readable | None] = {}
        """One for each thread in `wait`, released when something is handled of what it waits for. Not a condition: that
        would be held while a signal handler runs, and the thread that reads for the handler would wait for it."""
        self._served: set[Readable] = set()
        """Connections of which something was handled since threads in `wait` were last woken."""
        self._callers: list[Awaited] = []
        """What threads wait for in `read_until_there`."""
        self._rests_until = 0.0
        self._resume = threading.Event()
        """Ends the thread's rest."""
        self._connections: set[Readable] = set()
        self._selector: _Selector | None = None
        self._owners: dict[int, Readable] = {}
        """Who watches a descriptor."""
        self._waker = self._poker = -1
        """The ends of a pipe that interrupts the selector, and is closed with it."""
        self._woken: deque[Readable] = deque()
        self._retrying: deque[Readable] = deque()
        self._tick_at = 0.0
        self._thread: threading.Thread | None = None
        _READERS.add(self)

    # ---- connections

    def add(self, connection: Readable) -> None:
        """Adds a connection, which the thread reads from now on."""
        with self._lock:
            if self._selector is None:
                self._selector = _Selector()
                self._waker, self._poker = os.pipe()
                for fd in (self._waker, self._poker):
                    os.set_blocking(fd, False)
                self._selector.register(self._waker, _READABLE)
            self._connections.add(connection)
            self._tick_at = min(self._tick_at, time.monotonic() + connection.interval)
            if self._thread is None:
                self._thread = self._start()

    def discard(self, connection: Readable) -> None:
        """Removes a connection that has ended; none of its descriptors is watched."""
        with self._lock:
            self._connections.discard(connection)
            last = not self._connections
        if last:
            self.poke()

    def join(self, timeout: float) -> None:
        """Waits for the reader's thread to end, if no connection is left."""
        with self._lock:
            thread = None if self._connections else self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def watch(self, fd: int, connection: Readable, *, writing: bool = False) -> None:
        """Calls `on_ready` when the descriptor is readable, or writable."""
        assert self._selector is not None
        self._owners[fd] = connection
        self._selector.register(fd, _WRITABLE if writing else _READABLE)

    def unwatch(self, fd: int) -> None:
        """Stops watching: before the descriptor is closed, and at end of file, where it would always be ready."""
        self._owners.pop(fd, None)
        if self._selector is not None:
            with contextlib.suppress(KeyError, ValueError, OSError):
                self._selector.unregister(fd)

    def retry_soon(self, connection: Readable) -> None:
        """Calls `on_wake` after a short time: data is pending, and no descriptor can be polled for writability."""
        self._retrying.append(connection)
        if threading.get_ident() not in _handling:  # else it reads, and `poke` would end its next wait at once
            self.poke()

    def wake(self, connection: Readable) -> None:
        """Makes the thread call `on_wake` soon."""
        self._woken.append(connection)
        self.poke()

    def poke(self) -> None:
        """Interrupts the thread's `select`."""
        with self._lock, contextlib.suppress(BlockingIOError):  # the pipe is full: it wakes up anyway
            if self._selector is not None:
                os.write(self._poker, b"!")

    def leave_to_parent(self) -> None:
        """In a forked child: closes what is shared with the parent, without changing its state."""
        self._lock, self._reading = threading.RLock(), threading.Lock()  # the parent's threads may have held them
        self._resume = threading.Event()
        self._thread = None
        selector, self._selector = self._selector, None
        self._connections.clear()
        self._owners.clear()
        if selector is not None:
            selector.close()
            for fd in (self._waker, self._poker):
                os.close(fd)

    # ---- waiting

    def wait(self, done: Callable[[], bool], timeout: float | None = None, of: Readable | None = None) -> bool:
        """Waits until `done()`, which is checked after each reply: with `of`, after those of that connection.

        False: the timeout expired, or no connection is left. Raises UsageError on the reader's own thread.
        """
        refuse_to_wait()
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        SIGNAL_GUARD.wrap()
        handled = threading.Lock()
        with SIGNAL_GUARD:
            self._end_rest()
            self._waits[handled] = of
            try:
                while not done():
                    rest = deadline - time.monotonic()
                    if rest <= 0:
                        return False
                    if self._thread is None:  # it has run all actions
                        return done()
                    SIGNAL_GUARD.acquire(handled, min(rest, _NAP))
            finally:
                del self._waits[handled]
        return True

    def read_until_there(self, reply: Awaited) -> None:
        """Waits for a reply, and reads the connections meanwhile unless another thread does.

        Call it inside a block of SIGNAL_GUARD: a handler that raised while what was read is handled would lose it.
        """
        self._callers.append(reply)
        try:
            if self._reading.acquire(blocking=False):
                try:
                    while self._connections and not reply.is_there:
                        self._read_once()
                    self._rest()
                except SignalCame:  # its handler runs in `block`, and may read
                    self._end_rest()
                finally:
                    self._reading.release()
            if not reply.is_there:
                reply.block()
                self._rest()
        finally:
            self._callers.remove(reply)
            if self._callers:  # of other threads, or of this one: this is a signal handler
                self._end_rest()

    def _rest(self) -> None:
        """Leaves reading to callers for a while, if they come one after another."""
        if len(self._callers) == 1 and not self._waits:
            self._rests_until = time.monotonic() + _REST

    def _end_rest(self) -> None:
        self._rests_until = 0.0
        self._resume.set()

    # ---- the reader's thread

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="skyfab-reader", daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        while True:
            rest = self._rests_until - time.monotonic()
            if rest > 0:
                self._resume.wait(rest)
                self._resume.clear()
                continue
            with self._reading:
                if self._is_over():
                    return
                if self._rests_until <= time.monotonic():
                    self._read_once()

    def _read_once(self) -> None:
        """Waits once for any connection to become ready, and handles what was received."""
        selector = self._selector
        assert selector is not None
        seconds = self._tick_at - time.monotonic()
        if self._retrying:
            seconds = min(seconds, _RETRY)
        if seconds < 0 or self._woken:
            seconds = 0
        is_main = threading.get_ident() == SIGNAL_GUARD.main  # handlers run on that thread only
        for fd, _ in SIGNAL_GUARD.poll(selector.poll, min(seconds, NAP)) if is_main else selector.poll(seconds):
            connection = self._owners.get(fd)
            if connection is not None:
                self._serve(connection, connection.on_ready, fd)
            elif fd == self._waker:
                with contextlib.suppress(BlockingIOError):
                    os.read(fd, 4096)
        if self._woken or self._retrying:
            self._wake_up()
        now = time.monotonic()
        if now >= self._tick_at:
            self._tick(now)
        if self._waits:
            self._notify()

    def _notify(self) -> None:
        served, self._served = self._served, set()
        for handled, of in tuple(self._waits.items()):
            if of is None or of in served or self._thread is None:
                with contextlib.suppress(RuntimeError):  # it was released already, and its thread has not run since
                    handled.release()

    def _wake_up(self) -> None:
        woken = {queue.popleft() for queue in (self._woken, self._retrying) for _ in range(len(queue))}
        for connection in woken:
            self._serve(connection, connection.on_wake)

    def _tick(self, now: float) -> None:
        with self._lock:
            connections = list(self._connections)
            self._tick_at = now + min((connection.interval for connection in connections), default=1.0)
        for connection in connections:
            self._serve(connection, connection.on_tick, now)

    def _serve(self, connection: Readable, handler: Callable[..., Sequence[Action]], *arguments: float) -> None:
        """Calls one method of a connection and runs the actions that it returns."""
        me = threading.get_ident()
        _handling.add(me)
        try:
            try:
                actions = handler(*arguments)
            except Exception as error:
                actions = connection.on_error(error)
            run(actions)
            if self._waits:  # after the actions: who begins to wait later sees what they did
                self._served.add(connection)
        finally:
            _handling.discard(me)

    def _is_over(self) -> bool:
        """Whether no connection is left; then closes the reader's own resources."""
        if self._connections:
            return False
        with self._lock:
            if self._connections:
                return False
            assert self._selector is not None
            self._thread = None
            self._notify()
            self._selector.close()
            self._selector = None
            os.close(self._poker)
            os.close(self._waker)
            self._woken.clear()
            self._retrying.clear()
            return True


def run(actions: Iterable[Action]) -> None:
    """Runs actions. One that raises does not keep the others, which belong to other calls, from running."""
    for action in actions:
        try:
            action()
        except BaseException:
            print("skyfab: a reply could not be handled", file=sys.stderr)
            traceback.print_exc()


_READERS: Final[weakref.WeakSet[SharedReader]] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    _handling.clear()  # new threads may get the numbers of the parent's
    for reader in list(_READERS):
        reader.leave_to_parent()
    _READERS.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)
