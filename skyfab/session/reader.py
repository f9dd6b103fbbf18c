"""SharedReader: one thread, or any thread that waits for a reply, reads all connections of a pool.

A caller that reads for itself needs nobody to wake it: that halves the way of a reply. The reader's own thread steps
back while callers come one after another, and takes over when they stop.

Invariants: at most one thread reads at a time (it holds `reading`). While there are connections, the thread or a
caller reads. An action that raises keeps no other from running. A thread that waits or runs actions never waits again
inside of that. Descriptors are watched and unwatched from any thread, always before they are closed.
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
"""Seconds that the thread leaves reading to callers after the last of them."""
_LONG: Final = 0.2
"""Seconds after which a caller is one that waits for long: the thread sleeps until it is done."""
_NAP: Final = 0.05
_RETRY: Final = 0.002
"""Seconds between attempts to write where no descriptor tells when there is room."""

_waiting: Final[set[int]] = set()
"""Threads, by their numbers, that wait for a host or run what follows from what was read."""


def refuse_nested_wait() -> None:
    """Raises UsageError where this thread already waits for a host: what it would wait for may need that to end."""
    if threading.get_ident() in _waiting:
        raise UsageError(
            "a signal handler or a subscriber of events cannot wait for a call: its thread is the one that reads",
            hint="start a thread for it, or use compute.submit(call) and its add_done_callback",
        )


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
    new_selector, READ, WRITE = select.epoll, select.EPOLLIN, select.EPOLLOUT
else:
    new_selector, READ, WRITE = Selector, 1, 4


class Readable(Protocol):
    """A connection, as its reader sees it. Each method returns actions to run without any lock."""

    @property
    def interval(self) -> float:
        """Seconds between calls of `on_tick`."""

    def on_ready(self, fd: int) -> Sequence[Action]:
        """A descriptor that it watches is ready."""

    def on_wake(self) -> Sequence[Action]:
        """It has asked for this with `wake`."""

    def on_tick(self, now: float) -> Sequence[Action]:
        """Time has passed."""

    def on_error(self, error: BaseException) -> Sequence[Action]:
        """One of the others has raised. The other connections go on."""


class SharedReader:
    """Reads any number of connections. It has a thread and descriptors only while there are some."""

    def __init__(self) -> None:
        self.reading = threading.Lock()
        """Held by the one who reads."""
        self._lock = threading.RLock()  # a signal handler may cancel a call, which pokes
        """For what follows, but for lists and sets that change in one step."""
        self._connections: set[Readable] = set()
        self._selector: select.epoll | Selector | None = None
        self._owners: dict[int, Readable] = {}
        """Who watches a descriptor."""
        self._waker = self._poker = -1
        self._woken: deque[Readable] = deque()
        self._retrying: deque[Readable] = deque()
        self._tick_at = 0.0
        self._callers: list[None] = []
        """As many as wait. A list, because it grows and shrinks without a lock."""
        self._last_call = 0.0
        self._thread_reads = False
        self._resting = False
        self._rested = threading.Event()
        self._reader = 0
        """The number of the thread that reads."""
        self._followers: list[threading.Event] = []
        self._thread: threading.Thread | None = None
        _READERS.add(self)

    # ---- connections

    def add(self, connection: Readable) -> None:
        """From now on somebody always reads it."""
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
        """It has ended: nothing of it is watched any more."""
        with self._lock:
            self._connections.discard(connection)
            last = not self._connections
        if last:
            self._rested.set()
            self.poke()

    def join(self, timeout: float) -> None:
        """Waits for the thread to end, where no connection is left."""
        with self._lock:
            thread = None if self._connections else self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def watch(self, fd: int, connection: Readable, *, writing: bool = False) -> None:
        """Calls `on_ready` when there is something to read, or room to write."""
        assert self._selector is not None
        self._owners[fd] = connection
        self._selector.register(fd, WRITE if writing else READ)

    def unwatch(self, fd: int) -> None:
        """Before it is closed, and at its end: there it would be ready for ever."""
        self._owners.pop(fd, None)
        if self._selector is not None:
            with contextlib.suppress(KeyError, ValueError, OSError):
                self._selector.unregister(fd)

    def retry_soon(self, connection: Readable) -> None:
        """Calls `on_wake` in a moment: it has something to write, and no descriptor tells when there is room."""
        self._retrying.append(connection)
        self.poke()

    def wake(self, connection: Readable) -> None:
        """Calls `on_wake`, soon, on the thread that reads."""
        self._woken.append(connection)
        self.poke()

    def poke(self) -> None:
        """Makes the one who reads look again."""
        if self._reader != threading.get_ident():
            with self._lock, contextlib.suppress(BlockingIOError):  # then it will look anyway
                if self._poker >= 0:
                    os.write(self._poker, b"!")

    def leave_to_parent(self) -> None:
        """In a forked child: lets go of what it shares with the parent, and changes nothing of it."""
        selector, self._selector = self._selector, None
        self._connections.clear()
        if selector is not None:
            selector.close()
            for fd in (self._waker, self._poker):
                os.close(fd)
            self._waker = self._poker = -1

    # ---- waiting

    def wait(self, done: Callable[[], bool], timeout: float | None = None) -> bool:
        """Reads until `done()`; lets another thread read where one already does.

        False: time is up, or no connection is left. Raises UsageError inside another wait of the same thread.
        """
        refuse_nested_wait()
        me = threading.get_ident()
        deadline = None if timeout is None else time.monotonic() + timeout
        with SIGINT_GUARD:  # else an interrupt between these lines leaves a caller behind that never reads
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
                with self.reading:  # the thread that saw the end may still be telling those who waited
                    return done()
            if self.reading.acquire(blocking=False):
                try:
                    if not done():  # while this thread took its turn, another may have read just that
                        self._read_once(rest)
                finally:
                    self.reading.release()
            else:
                self._follow(_NAP if rest is None else min(rest, _NAP))
        return True

    def _follow(self, timeout: float) -> None:
        """Waits for the thread that reads to finish something or to leave."""
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
        """Nobody reads now: one of those that wait may."""
        with self._lock:
            for event in self._followers[:1]:
                event.set()

    # ---- reading, with `reading` held, and SIGINT held back on the main thread

    def _read_once(self, timeout: float | None) -> None:
        """Waits for the connections once, and handles what has come."""
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
            depth = SIGINT_GUARD.pause()  # here alone may it be interrupted: nothing has been read yet
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
        """Runs what follows from one handler of a connection; says whether anything did."""
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
        """Runs what follows from what was read, on the thread that reads."""
        raised: BaseException | None = None
        for action in actions:
            try:
                action()
            except BaseException as error:  # the other actions are about other calls: they must be told all the same
                if isinstance(error, Exception) or threading.get_ident() != MAIN:
                    print("skyfab: an answer could not be handled", file=sys.stderr)
                    traceback.print_exc()
                else:
                    raised = raised or error
        if raised is not None:  # the program's own: a signal handler of it has raised SystemExit, say
            raise raised

    # ---- the thread

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
        """Leaves the reading to callers for as long as they come one after another."""
        since = time.monotonic()
        while self._connections:
            now = time.monotonic()
            if not self._callers and now - self._last_call >= _LINGER:
                return
            if self._callers and now - max(since, self._last_call) > _LONG:
                self._resting = True
                if self._callers and self._connections:  # else nobody sets it
                    self._rested.wait(1.0)
                self._resting = False
                self._rested.clear()
            else:
                time.sleep(_LINGER)

    def _is_over(self) -> bool:
        """No connection is left: closes what is the reader's own."""
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
            return True


_READERS: Final[weakref.WeakSet[SharedReader]] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for reader in list(_READERS):
        reader.leave_to_parent()
    _READERS.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)
