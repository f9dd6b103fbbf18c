"""SharedReader: reads all connections of a pool, on its own thread or on any thread that waits for a reply.

A caller that reads its reply itself needs no wake-up by another thread: that halves the latency of a reply. The
reader's own thread pauses while callers follow each other closely, and takes over when they stop.

Invariants: at most one thread reads at a time (it holds `reading`). While there are connections, the thread or a
caller reads. An action that raises does not keep others from running. A thread that waits or runs actions never
starts another wait inside. Descriptors are watched and unwatched from any thread, and unwatched before they are closed.
"""

from __future__ import annotations

import contextlib
import os
import select
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
from skyfab.session.sigint import MAIN, SIGINT_GUARD

Action = Callable[[], None]

_LINGER: Final = 0.008
"""Seconds after the last caller before the thread resumes reading."""
_LONG: Final = 0.2
"""After so many seconds a caller counts as a long wait: the thread then sleeps until it has finished."""
_NAP: Final = 0.05
_RETRY: Final = 0.002
"""Seconds between write attempts on a stream that has no descriptor to poll for writability."""

_waiting: Final[set[int]] = set()
"""The ids of threads that wait for a host or run actions."""


def refuse_nested_wait() -> None:
    """Raises UsageError if this thread already waits for a host: the inner wait might depend on the outer one."""
    if threading.get_ident() in _waiting:
        raise UsageError(
            "a signal handler or a subscriber of events cannot wait for a call: its thread is the one that reads",
            hint="start a thread for it, or use compute.submit(call) and its add_done_callback",
        )


READ: Final = 1
WRITE: Final = 4
"""EPOLLIN and EPOLLOUT, by their numbers: other systems lack the names."""


class Selector:
    """The same as `select.epoll`, on systems that have none."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self.close = self._selector.close

    def register(self, fd: int, events: int) -> None:
        self._selector.register(fd, selectors.EVENT_WRITE if events == WRITE else selectors.EVENT_READ)

    def unregister(self, fd: int) -> None:
        self._selector.unregister(fd)

    def poll(self, seconds: float) -> list[tuple[int, int]]:
        return [(key.fd, events) for key, events in self._selector.select(seconds)]


if sys.platform == "linux":  # without the steps that `selectors` takes for each event: calls wait for this
    new_selector = select.epoll
else:
    new_selector = Selector


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
        self.reading = threading.Lock()
        """Held by the thread that reads."""
        self._lock = threading.RLock()  # reentrant: a signal handler may cancel a call, which calls `poke`
        """Protects the attributes below, except lists and sets that change in one atomic operation."""
        self._connections: set[Readable] = set()
        self._selector: select.epoll | Selector | None = None
        self._owners: dict[int, Readable] = {}
        """Who watches a descriptor."""
        self._waker = self._poker = -1
        self._woken: deque[Readable] = deque()
        self._retrying: deque[Readable] = deque()
        self._tick_at = 0.0
        self._callers: list[None] = []
        """One entry for each waiting thread. A list, because it can be changed atomically without a lock."""
        self._last_call = 0.0
        self._thread_reads = False
        self._resting = False
        self._rested = threading.Event()
        self._reader = 0
        """The id of the thread that handles what was read; 0 for none."""
        self._followers: list[threading.Event] = []
        self._thread: threading.Thread | None = None
        _READERS.add(self)

    # ---- connections

    def add(self, connection: Readable) -> None:
        """Adds a connection; from now on some thread always reads it."""
        with self._lock:
            if self._selector is None:
                self._selector = new_selector()
                self._waker, self._poker = os.pipe()
                for fd in (self._waker, self._poker):
                    os.set_blocking(fd, False)
                self._selector.register(self._waker, READ)
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
            self._rested.set()
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
        self._selector.register(fd, WRITE if writing else READ)

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
        """Makes the reading thread call `on_wake` soon."""
        self._woken.append(connection)
        self.poke()

    def poke(self) -> None:
        """Interrupts the reading thread's `select`."""
        if self._reader != threading.get_ident():
            with self._lock, contextlib.suppress(BlockingIOError):  # the pipe is full: it wakes up anyway
                if self._poker >= 0:
                    os.write(self._poker, b"!")

    def leave_to_parent(self) -> None:
        """In a forked child: closes what is shared with the parent, without changing its state."""
        self._lock, self.reading = threading.RLock(), threading.Lock()  # the parent's threads may have held them
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
        """Reads until `done()`; if another thread already reads, waits for it.

        False: the timeout expired, or no connection is left. Raises UsageError inside another wait of the same thread.
        """
        refuse_nested_wait()
        me = threading.get_ident()
        deadline = None if timeout is None else time.monotonic() + timeout
        with SIGINT_GUARD:  # else an interrupt between these lines leaves an entry in _callers without a reader
            _waiting.add(me)
            self._callers.append(None)
            try:
                if self._thread_reads:
                    self.poke()
                return self._read_until(done, deadline)
            finally:
                self._callers.pop()
                self._last_call = time.monotonic()
                _waiting.discard(me)
                if self._followers:
                    self._wake_next()
                elif self._resting:
                    self._rested.set()

    def _read_until(self, done: Callable[[], bool], deadline: float | None) -> bool:
        while not done():
            rest = None
            if deadline is not None:
                rest = deadline - time.monotonic()
                if rest <= 0:
                    return False
            if not self._connections:
                with self.reading:  # the thread that saw the end may still be running callbacks
                    return done()
            if self.reading.acquire(blocking=False):
                try:
                    if not done():  # another thread may have read it before this one got the lock
                        self._read_once(rest)
                finally:
                    self.reading.release()
            else:
                self._follow(_NAP if rest is None else min(rest, _NAP))
        return True

    def _follow(self, timeout: float) -> None:
        """Waits until the reading thread has run actions, or has stopped reading."""
        event = threading.Event()
        with self._lock:
            self._followers.append(event)
        try:
            if threading.get_ident() == MAIN:
                depth = SIGINT_GUARD.pause()
                try:
                    event.wait(timeout)
                finally:
                    SIGINT_GUARD.resume(depth)
            else:
                event.wait(timeout)
        finally:
            with self._lock:
                self._followers.remove(event)

    def _wake_next(self) -> None:
        """No thread reads now: wakes one of the waiting threads to take over."""
        with self._lock:
            for event in self._followers[:1]:
                event.set()

    # ---- reading, with `reading` held, and SIGINT held back on the main thread

    def _read_once(self, timeout: float | None) -> None:
        """Waits once for any connection to become ready, and handles what was received."""
        selector = self._selector
        if selector is None:
            return
        seconds = self._tick_at - time.monotonic()
        if timeout is not None and timeout < seconds:
            seconds = timeout
        if self._retrying:
            seconds = min(seconds, _RETRY)
        if seconds < 0 or self._woken:
            seconds = 0
        me = threading.get_ident()
        if me == MAIN:
            depth = SIGINT_GUARD.pause()  # interrupts are allowed only here, where nothing has been read yet
            try:
                ready = selector.poll(seconds)
            finally:
                SIGINT_GUARD.resume(depth)
        else:
            ready = selector.poll(seconds)
        self._reader = me
        try:
            self._handle(ready)
        finally:
            self._reader = 0

    def _handle(self, ready: list[tuple[int, int]]) -> None:
        acted = False
        for fd, _ in ready:
            connection = self._owners.get(fd)
            if connection is not None:
                acted = self._serve(connection, connection.on_ready, fd) or acted
            elif fd == self._waker:
                with contextlib.suppress(BlockingIOError):
                    os.read(fd, 4096)
        if self._woken or self._retrying:
            acted = self._wake_up() or acted
        now = time.monotonic()
        if now >= self._tick_at:
            acted = self._tick(now) or acted
        if acted and self._followers:
            with self._lock:
                for event in self._followers:
                    event.set()

    def _wake_up(self) -> bool:
        acted = False
        woken = {queue.popleft() for queue in (self._woken, self._retrying) for _ in range(len(queue))}
        for connection in woken:
            acted = self._serve(connection, connection.on_wake) or acted
        return acted

    def _tick(self, now: float) -> bool:
        acted = False
        with self._lock:
            connections = list(self._connections)
            self._tick_at = now + min((connection.interval for connection in connections), default=1.0)
        for connection in connections:
            acted = self._serve(connection, connection.on_tick, now) or acted
        return acted

    def _serve(self, connection: Readable, handler: Callable[..., Sequence[Action]], *arguments: float) -> bool:
        """Calls one method of a connection and runs the actions that it returns. True: there were any."""
        try:
            actions = handler(*arguments)
        except BaseException as error:
            self.run(connection.on_error(error))
            if not isinstance(error, Exception):
                raise
            return True
        if actions:
            self.run(actions)
        return bool(actions)

    def run(self, actions: Iterable[Action]) -> None:
        """Runs actions on the reading thread."""
        raised: BaseException | None = None
        for action in actions:
            try:
                action()
            except BaseException as error:  # the other actions belong to other calls and must run all the same
                if isinstance(error, Exception) or threading.get_ident() != MAIN:
                    print("skyfab: an answer could not be handled", file=sys.stderr)
                    traceback.print_exc()
                else:
                    raised = raised or error
        if raised is not None:  # raised by the program itself, for example SystemExit in a signal handler
            raise raised

    # ---- the reader's own thread

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="skyfab-reader", daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        _waiting.add(threading.get_ident())
        try:
            while not self._is_over():
                self._step_back()
                with self.reading:
                    self._thread_reads = True
                    try:
                        while self._connections and not self._callers:
                            self._read_once(None)
                    finally:
                        self._thread_reads = False
                self._wake_next()
        finally:
            _waiting.discard(threading.get_ident())

    def _step_back(self) -> None:
        """Leaves the reading to callers while they follow each other closely."""
        since = time.monotonic()
        while self._connections:
            now = time.monotonic()
            if not self._callers and now - self._last_call >= _LINGER:
                return
            if self._callers and now - max(since, self._last_call) > _LONG:
                self._resting = True
                if self._callers and self._connections:  # else nothing sets the event
                    self._rested.wait(1.0)
                self._resting = False
                self._rested.clear()
            else:
                time.sleep(_LINGER)

    def _is_over(self) -> bool:
        """Whether no connection is left; then closes the reader's own resources."""
        if self._connections:
            return False
        with self.reading, self._lock:
            if self._connections or self._selector is None:
                return not self._connections
            self._thread = None
            self._selector.close()
            self._selector = None
            waker, poker, self._waker, self._poker = self._waker, self._poker, -1, -1
            os.close(poker)
            os.close(waker)
            self._woken.clear()
            self._retrying.clear()
            return True


_READERS: Final[weakref.WeakSet[SharedReader]] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    _waiting.intersection_update({threading.get_ident()})  # new threads may get the numbers of the parent's
    for reader in list(_READERS):
        reader.leave_to_parent()
    _READERS.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)
