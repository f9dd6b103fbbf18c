"""Events of a pool, as immutable values, and `Events`, which delivers them to subscribers (screen, logs, tests).

``str(event)`` is a readable line.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final, Literal

from skyfab._util.signals import SIGNAL_GUARD
from skyfab._util.sizes import progress
from skyfab.errors import located

HERE: Final = "this machine"
"""In place of a host's name."""
State = Literal["connecting", "preparing", "ready", "reconnecting", "lost", "failed", "closed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base class: something that happened on one host."""

    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState(Event):
    """A host's state changed."""

    state: State
    detail: str = ""
    """Details for the user: a version, a size, a reason."""
    limit: float | None = None
    """While reconnecting: the seconds without an answer after which the host is lost."""

    def __str__(self) -> str:
        limit = "" if self.limit is None else f"; lost after {self.limit:g} s"
        return f"{self.host}: {self.state}" + (f" ({self.detail}{limit})" if self.detail else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Output(Event):
    """One line that a worker wrote."""

    rank: int | None
    """The global rank in a gang; None for a solo call."""
    stream: Literal["stdout", "stderr"]
    text: str
    """The line without its line ending."""
    end: str = "\n"
    """``"\\r"`` if the line is to be overwritten, as in progress bars."""

    def __str__(self) -> str:
        return f"{located(self.host, self.rank)} {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStarted(Event):
    """A call was sent to a host."""

    call: int
    function: str
    ranks: int = 1

    def __str__(self) -> str:
        return f"{self.host}: {self.function} started"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnded(Event):
    """A call ended."""

    call: int
    function: str
    seconds: float
    error: str | None = None
    """The type name of the exception that it raised."""

    def __str__(self) -> str:
        how = "done" if self.error is None else f"raised {self.error}"
        return f"{self.host}: {self.function} {how} after {self.seconds:.2f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Importing(Event):
    """A worker has begun to import a package, or has done so."""

    rank: int | None
    """The global rank in a gang; None for a solo call."""
    worker: str
    module: str
    """Empty when it has ended."""

    def __str__(self) -> str:
        return f"{located(self.host, self.rank)}: {f'importing {self.module}' if self.module else 'imported'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped(Event):
    """Progress of a `map`: how many of its items have a result. At its end, all; or it has failed."""

    function: str
    done: int
    total: int
    failed: bool = False

    def __str__(self) -> str:
        return f"{self.function}: {self.done:,} of {self.total:,}{' (failed)' if self.failed else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled(Event):
    """A call's ranks make no progress: see ``@sky.function(stall=…)``."""

    function: str
    seconds: float
    text: str
    """The stacks of its ranks, grouped."""

    def __str__(self) -> str:
        return f"{self.host}: {self.function} has made no progress for {self.seconds:g} s\n{self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Event):
    """A warning for the user. Nothing is stopped."""

    text: str

    def __str__(self) -> str:
        return f"{self.host}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved(Event):
    """Progress of a transfer to or from a host, in bytes."""

    what: str
    done: int
    total: int

    def __str__(self) -> str:
        return f"{self.host}: {self.what} {progress(self.done, self.total)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Event):
    """What a host, or this machine, does before a transfer has progress in bytes. Empty: it has ended."""

    text: str

    def __str__(self) -> str:
        return f"{self.host}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesWritten(Event):
    """Emitted when a pool closes and its functions have written files in a persistent working folder."""

    path: str
    """The folder, on the host."""
    what: str
    """How many files, their size, and the names of the latest."""
    fetch: str
    """The command that copies the folder here."""

    def __str__(self) -> str:
        return f"{self.host}: wrote {self.what} in {self.path}\n  to fetch: {self.fetch}"


Subscriber = Callable[[Event], None]


_calls = itertools.count(1)

emitting: Final[set[int]] = set()
"""Ids of the threads that run a subscriber. They must not wait for calls, which may need the same thread to proceed."""
# In a forked child new threads may get the ids of the parent's.
os.register_at_fork(after_in_child=lambda: emitting.intersection_update({threading.get_ident()}))


class Waiting:
    """A context in which a thread waits for a call; true while any thread does. Thread-safe."""

    __slots__ = ("_threads", "over")

    def __init__(self) -> None:
        self._threads: list[None] = []  # a list, because it can be changed atomically without a lock
        self.over: Callable[[], None] | None = None
        """Called when no thread waits: a view that has drawn something for them erases it."""

    def __enter__(self) -> None:
        self._threads.append(None)

    def __exit__(self, *_: object) -> None:
        self._threads.pop()
        if self.over is not None and not self._threads:
            self.over()

    def __bool__(self) -> bool:
        return bool(self._threads)


class Events:
    """Delivers each event to every subscriber, in order of emission per host."""

    def __init__(self) -> None:
        self._subscribers: tuple[Subscriber, ...] = ()
        self._lock = threading.Lock()
        self.waiting = Waiting()
        self.unread: Future[None] = Future()
        """Done when events are shown on a pipe that is no longer read (`| head`)."""

    def subscribe(self, callback: Subscriber) -> Callable[[], None]:
        """Calls `callback` with each event from now on, on the thread that emits it.

        Returns a function that ends the subscription.
        """
        with self._lock:
            self._subscribers = (*self._subscribers, callback)

        def unsubscribe() -> None:
            with self._lock:
                self._subscribers = tuple(s for s in self._subscribers if s is not callback)

        return unsubscribe

    @property
    def active(self) -> bool:
        """There are subscribers."""
        return bool(self._subscribers)

    def call(self, function: str, *hosts: str, ranks: Sequence[int] = ()) -> Callable[[BaseException | None], None]:
        """Emits that a call started on these hosts; returns a function that emits that it ended, with its error.

        `ranks` is how many ranks each host has; one if it is not given.
        """
        if not self._subscribers:
            return lambda error: None
        number, began = next(_calls), time.monotonic()
        for host, count in zip(hosts, ranks or itertools.repeat(1)):  # noqa: B905
            self.emit(CallStarted(host=host, call=number, function=function, ranks=count))

        def ended(error: BaseException | None) -> None:
            kind = None if error is None else type(error).__name__
            for host in hosts:
                seconds = time.monotonic() - began
                self.emit(CallEnded(host=host, call=number, function=function, seconds=seconds, error=kind))

        return ended

    def progress(self, function: str, total: int) -> Callable[[int, bool], None]:
        """Returns a function that emits how many items of a `map` are done, and whether it failed."""
        return lambda done, failed: self.emit(Mapped(host="", function=function, done=done, total=total, failed=failed))

    def emit(self, event: Event) -> None:
        """Calls all subscribers. One that raises, SystemExit included, is reported and does not affect the others."""
        if not self._subscribers:
            return
        me = threading.get_ident()
        with SIGNAL_GUARD if me == SIGNAL_GUARD.main else nullcontext():  # views have locks, which other threads need
            nested = me in emitting
            emitting.add(me)
            try:
                for subscriber in self._subscribers:
                    try:
                        subscriber(event)
                    except KeyboardInterrupt:  # Ctrl-C while it ran: for the program to handle
                        raise
                    except BaseException:
                        print(f"skyfab: a subscriber failed on {event!r}", file=sys.stderr)
                        traceback.print_exc()
            finally:
                if not nested:
                    emitting.discard(me)
