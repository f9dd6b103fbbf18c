"""Turns: who reads a session's stream. Its own thread does, or a caller that waits for an answer.

A caller that reads for itself is woken by nobody: that halves the way of an answer. The thread steps back while callers
come one after another, and takes over when they stop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

_LINGER: Final = 0.008
"""Seconds that the thread leaves the stream to callers after the last of them."""
_NAP: Final = 0.05


class Turns:
    """Takes turns at `pump`, which waits for the stream once and reads what has come, until it is `over`."""

    def __init__(self, pump: Callable[[float | None], None], poke: Callable[[], None]) -> None:
        self._pump = pump
        self.over = False
        self._poke = poke
        self._lock = threading.Lock()
        self.held = threading.Lock()
        """Held by the one who reads."""
        self._callers: list[None] = []
        """As many as wait. A list, because it grows and shrinks without a lock."""
        self._last_call = 0.0
        self._thread_reads = False
        self._reader = 0
        self._followers: list[threading.Event] = []
        self._thread: threading.Thread | None = None

    def start(self, name: str) -> None:
        """From now on somebody always reads."""
        self._thread = threading.Thread(target=self._read_on, name=name, daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Waits for the thread to see that it is over."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def wait(self, done: Callable[[], bool], timeout: float | None = None) -> bool:
        """Reads until `done()`; lets another caller read where one already does. False: time is up, or it is over."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._callers.append(None)
        if self._thread_reads:
            self._poke()
        try:
            while not done():
                rest = None
                if deadline is not None:
                    rest = deadline - time.monotonic()
                    if rest <= 0:
                        return False
                if self.over:
                    return self._last_words(done)
                if self._reader != threading.get_ident() and self.held.acquire(blocking=False):
                    try:
                        self._pump(rest)
                    finally:
                        self.held.release()
                else:
                    self._follow(rest)
            return True
        finally:
            self._callers.pop()
            self._last_call = time.monotonic()
            if self._followers:
                self._wake_next()

    def _last_words(self, done: Callable[[], bool]) -> bool:
        """It is over; whoever saw it may still be telling those who waited."""
        if self._reader != threading.get_ident():
            with self.held:
                pass
        return done()

    def _follow(self, timeout: float | None) -> None:
        """Waits for the one who reads to finish something or to leave."""
        if self._reader == threading.get_ident():  # a callback waits for another call
            self._pump(timeout)
            return
        event = threading.Event()
        with self._lock:
            self._followers.append(event)
        try:
            event.wait(_NAP if timeout is None else min(timeout, _NAP))
        finally:
            with self._lock:
                self._followers.remove(event)

    def _wake_next(self) -> None:
        """The turn is free: somebody who waits may read."""
        with self._lock:
            for event in self._followers[:1]:
                event.set()

    def call(self, actions: Iterable[Callable[[], None]]) -> None:
        """Runs what follows from what was read, on the thread that has the turn, and tells those who follow."""
        outer, self._reader = self._reader, threading.get_ident()
        try:
            for action in actions:
                action()
        finally:
            self._reader = outer
        if self._followers:
            with self._lock:
                for event in self._followers:
                    event.set()

    def _read_on(self) -> None:
        while not self.over:
            if self._callers or time.monotonic() - self._last_call < _LINGER:
                time.sleep(_LINGER)
                continue
            with self.held:
                self._thread_reads = True
                try:
                    while not self._callers:
                        self._pump(None)
                        if self.over:
                            break
                finally:
                    self._thread_reads = False
            self._wake_next()
