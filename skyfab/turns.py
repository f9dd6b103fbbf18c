"""Turns: which thread reads a session's stream. Its own thread does, or a caller that waits for an answer.

A caller that reads for itself needs nobody to wake it: that halves the way of an answer. The thread steps back while
callers come one after another, and takes over when they stop.

Invariants: at most one thread reads at a time (`held`); while a session lives, its thread or a caller reads; an action
that raises keeps no other from running; a thread that waits, or runs actions, never waits again inside of that.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Final

from skyfab.errors import UsageError
from skyfab.interrupts import INTERRUPTS, MAIN

_LINGER: Final = 0.008
"""Seconds that the thread leaves the stream to callers after the last of them."""
_NAP: Final = 0.05

_waiting: Final[set[int]] = set()
"""Threads, by their numbers, that wait for a host or run what follows from what was read."""


def refuse_nested_wait() -> None:
    """Raises UsageError where this thread already waits for a host: what it would wait for may need that to end."""
    if threading.get_ident() in _waiting:
        raise UsageError(
            "a signal handler or a subscriber of events cannot wait for a call: its thread is the one that reads",
            hint="start a thread for it, or use compute.submit(call) and its add_done_callback",
        )


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
        self._followers: list[threading.Event] = []
        self._thread: threading.Thread | None = None

    def start(self, name: str) -> None:
        """From now on there is always a thread that reads."""
        self._thread = threading.Thread(target=self._read_on, name=name, daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Waits for the thread to see that it is over."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def wait(self, done: Callable[[], bool], timeout: float | None = None) -> bool:
        """Reads until `done()`; lets another caller read where one already does. False: time is up, or it is over.

        Raises UsageError inside another wait of the same thread.
        """
        refuse_nested_wait()
        me = threading.get_ident()
        deadline = None if timeout is None else time.monotonic() + timeout
        with INTERRUPTS:  # else an interrupt between these lines leaves a caller behind that never reads
            _waiting.add(me)
            self._callers.append(None)
            try:
                if self._thread_reads:
                    self._poke()
                return self._read_until(done, deadline)
            finally:
                self._callers.pop()
                self._last_call = time.monotonic()
                _waiting.discard(me)
                if self._followers:
                    self._wake_next()

    def _read_until(self, done: Callable[[], bool], deadline: float | None) -> bool:
        while not done():
            rest = None
            if deadline is not None:
                rest = deadline - time.monotonic()
                if rest <= 0:
                    return False
            if self.over:
                with self.held:  # the thread that saw the end may still be telling those who waited
                    return done()
            if self.held.acquire(blocking=False):
                try:
                    self._pump(rest)
                finally:
                    self.held.release()
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
                depth = INTERRUPTS.pause()
                try:
                    event.wait(timeout)
                finally:
                    INTERRUPTS.resume(depth)
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

    def call(self, actions: Iterable[Callable[[], None]]) -> None:
        """Runs what follows from what was read, on the thread that has the turn, and tells those who follow."""
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
        if self._followers:
            with self._lock:
                for event in self._followers:
                    event.set()
        if raised is not None:  # the program's own: a signal handler of it has raised SystemExit, say
            raise raised

    def _read_on(self) -> None:
        _waiting.add(threading.get_ident())
        try:
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
        finally:
            _waiting.discard(threading.get_ident())
