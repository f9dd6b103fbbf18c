"""SharedReader: the thread that reads all connections of a pool, and runs what follows from what it has read.

Invariants: while there are connections, the thread reads. An action that raises does not keep others from running.
Actions never wait for a host. Descriptors are watched and unwatched from any thread, and unwatched before they are
closed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from skyfab.errors import UsageError
from skyfab.session.sigint import SIGINT_GUARD

Action = Callable[[], None]

_NAP: Final = 0.05
"""Seconds between checks of a condition that may change without a reply."""
_RETRY: Final = 0.002
"""Seconds between write attempts on a stream that has no descriptor to poll for writability."""

_reading: Final[set[int]] = set()
"""The ids of the readers' threads."""


def refuse_to_wait() -> None:
    """Raises UsageError on a reader's thread: what it would wait for could not be read."""
    if threading.get_ident() in _reading:
        raise UsageError(
            "a callback cannot wait for a call: its thread is the one that reads replies",
            hint="start a thread for it, or use compute.submit(call) and its add_done_callback",
        )


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
        self._handled = threading.Condition()
        """Notified when what was read is handled, and when the thread ends."""
        self._connections: set[Readable] = set()
        self._selector: selectors.BaseSelector | None = None
        self._owners: dict[int, Readable] = {}
        """Who watches a descriptor."""
        self._waker = self._poker = -1
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
                self._selector = selectors.DefaultSelector()
                self._waker, self._poker = os.pipe()
                for fd in (self._waker, self._poker):
                    os.set_blocking(fd, False)
                self._selector.register(self._waker, selectors.EVENT_READ)
            self._connections.add(connection)
            self._tick_at = 0.0
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
        self._selector.register(fd, selectors.EVENT_WRITE if writing else selectors.EVENT_READ)

    def unwatch(self, fd: int) -> None:
        """Stops watching: before the descriptor is closed, and at end of file, where it would always be ready."""
        self._owners.pop(fd, None)
        if self._selector is not None:
            with contextlib.suppress(KeyError, ValueError, OSError):
                self._selector.unregister(fd)

    def retry_soon(self, connection: Readable) -> None:
        """Calls `on_wake` after a short time: data is pending, and no descriptor can be polled for writability."""
        self._retrying.append(connection)
        self.poke()

    def wake(self, connection: Readable) -> None:
        """Makes the thread call `on_wake` soon."""
        self._woken.append(connection)
        self.poke()

    def poke(self) -> None:
        """Interrupts the thread's `select`."""
        with self._lock, contextlib.suppress(BlockingIOError):  # the pipe is full: it wakes up anyway
            if self._poker >= 0:
                os.write(self._poker, b"!")

    def leave_to_parent(self) -> None:
        """In a forked child: closes what is shared with the parent, without changing its state."""
        self._lock, self._handled = threading.RLock(), threading.Condition()  # the parent's threads may have held them
        self._thread = None
        selector, self._selector = self._selector, None
        self._connections.clear()
        self._owners.clear()
        if selector is not None:
            selector.close()
            for fd in (self._waker, self._poker):
                os.close(fd)
            self._waker = self._poker = -1

    # ---- waiting

    def wait(self, done: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits until `done()`, which is checked after each reply.

        False: the timeout expired, or no connection is left. Raises UsageError on the reader's own thread.
        """
        refuse_to_wait()
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        with SIGINT_GUARD, self._handled:
            while not done():
                rest = deadline - time.monotonic()
                if rest <= 0:
                    return False
                if self._thread is None:  # it has run all actions
                    return done()
                SIGINT_GUARD.allow(functools.partial(self._handled.wait, min(rest, _NAP)))
        return True

    # ---- the reader's thread

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="skyfab-reader", daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        _reading.add(threading.get_ident())
        try:
            while not self._is_over():
                self._read_once()
                with self._handled:
                    self._handled.notify_all()
        finally:
            _reading.discard(threading.get_ident())

    def _read_once(self) -> None:
        """Waits once for any connection to become ready, and handles what was received."""
        assert self._selector is not None
        seconds = self._tick_at - time.monotonic()
        if self._retrying:
            seconds = min(seconds, _RETRY)
        if seconds < 0 or self._woken:
            seconds = 0
        for key, _ in self._selector.select(seconds):
            connection = self._owners.get(key.fd)
            if connection is not None:
                self._serve(connection, connection.on_ready, key.fd)
            elif key.fd == self._waker:
                with contextlib.suppress(BlockingIOError):
                    os.read(key.fd, 4096)
        if self._woken or self._retrying:
            self._wake_up()
        now = time.monotonic()
        if now >= self._tick_at:
            self._tick(now)

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
        try:
            actions = handler(*arguments)
        except Exception as error:
            actions = connection.on_error(error)
        run(actions)

    def _is_over(self) -> bool:
        """Whether no connection is left; then closes the reader's own resources."""
        if self._connections:
            return False
        with self._handled, self._lock:
            if self._connections:
                return False
            assert self._selector is not None
            self._thread = None
            self._handled.notify_all()
            self._selector.close()
            self._selector = None
            waker, poker, self._waker, self._poker = self._waker, self._poker, -1, -1
            os.close(poker)
            os.close(waker)
            self._woken.clear()
            self._retrying.clear()
            return True


def run(actions: Iterable[Action]) -> None:
    """Runs actions. One that raises does not keep the others, which belong to other calls, from running."""
    for action in actions:
        try:
            action()
        except BaseException:
            print("skyfab: an answer could not be handled", file=sys.stderr)
            traceback.print_exc()


_READERS: Final[weakref.WeakSet[SharedReader]] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    _reading.clear()  # new threads may get the numbers of the parent's
    for reader in list(_READERS):
        reader.leave_to_parent()
    _READERS.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)
