"""`View`: base class of views. Collects text from events, and writes it in batches on a thread of its own.

Nothing is rendered line by line. When a call ends or a host's state changes, the thread that emits the event waits
until all text is written, so that what the program prints next comes after it. That thread may be the one that reads
the connections and sends heartbeats, so it waits for a limited time. An output that takes longer (a pipe that is not
read, a terminal that is paused) is behind: until it has caught up, no thread waits for it, and text is kept up to
`_MOST`. Beyond that the oldest lines are dropped, and a line reports how many.
"""

from __future__ import annotations

import itertools
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from skyfab.errors import located
from skyfab.ui.events import (
    CallEnded,
    CallStarted,
    Event,
    FilesWritten,
    HostState,
    Importing,
    Mapped,
    Moved,
    Notice,
    Output,
    Stalled,
    State,
    Step,
)
from skyfab.ui.suppressed import is_noise
from skyfab.ui.terminal import clean, clean_lines, has_colours, put

Line = tuple[str, str]
"""The output stream of a line, and its text with its line ending."""

_PACE: Final = 0.025
TIMEOUT: Final = 2.0
"""Most seconds that the emitting thread waits for the output."""
_MOST: Final = 16 * 1024 * 1024
"""Most characters that are buffered for a slow output. Beyond that the emitting thread waits for it."""
_OVERHEAD: Final = 100
"""Memory that a line takes besides its characters."""
_SPARSE: Final = 5.0
"""Seconds between updates of a progress bar in plain output, where lines cannot be overwritten."""
_LONG: Final = 5.0
"""Seconds after which plain output has a line for an import."""


class Imports:
    """The packages that workers import now."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._found: dict[tuple[str, str], tuple[Importing, float]] = {}
        """By host and worker: the latest, and since when."""

    def __len__(self) -> int:
        return len(self._found)

    def take(self, event: Importing | CallEnded) -> None:
        """The end of a call ends what its host imported: the process may have been stopped meanwhile."""
        if isinstance(event, CallEnded):
            for key in [key for key in self._found if key[0] == event.host]:
                del self._found[key]
        elif event.module:
            self._found[event.host, event.worker] = (event, self._clock())
        else:
            self._found.pop((event.host, event.worker), None)

    def since(self, seconds: float) -> list[Importing]:
        """Those that have taken this long."""
        now = self._clock()
        return [event for event, began in self._found.values() if now - began >= seconds]


def _ends_something(event: Event) -> bool:
    """Whether the program may continue after this event, and print something itself."""
    if isinstance(event, Moved):
        return event.done >= event.total
    return isinstance(event, (CallEnded, HostState)) or (isinstance(event, Step) and not event.text)


class View(ABC):
    """Shows a pool to the user, as a subscriber of its events. Thread-safe."""

    def __init__(self, clock: Callable[[], float], timeout: float = TIMEOUT) -> None:
        self._clock = clock
        self._timeout = min(timeout, TIMEOUT)
        self._has_colours = has_colours()
        self._states: dict[str, State] = {}
        """The last state of each host, in the order of their first events."""
        self._bars: dict[tuple[str, int | None, str], Output] = {}
        """Progress bars: lines to be overwritten that have not been yet, one for each rank and stream."""
        self._imports = Imports(clock)
        self._lines: deque[Line] = deque()
        self._waiting = 0
        self._dropped = 0
        self._lock = threading.RLock()  # reentrant: a signal handler may make a call
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._urgent = threading.Event()
        self._over = threading.Event()
        self._deaf = False
        self.unread: Future[None] = Future()
        """Done when the output is a pipe that is no longer read."""
        self._progress = threading.Condition()
        self._asked = self._written = 0
        """Number of requests to write all text, and the last request that is fulfilled."""
        self._behind = False

    # ---- input; `_take` and what it calls run with the lock held

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._take(event)
            waiting = self._waiting
        if waiting and (waiting > _MOST or _ends_something(event)):
            self._finish()
        elif waiting and not self._wake.is_set():
            self._soon()

    def _take(self, event: Event) -> None:
        if isinstance(event, Output):
            if event.end == "\r":
                self._bars[event.host, event.rank, event.stream] = event
                self._bar(event)
            else:
                self._output(event)
        elif isinstance(event, HostState):
            before = self._states.get(event.host)
            self._states[event.host] = event.state
            self._state(event, before)
        elif isinstance(event, Moved):
            self._moved(event)
        elif isinstance(event, Step):
            self._step(event)
        elif isinstance(event, (CallStarted, CallEnded, Mapped)):
            self._running(event)
            if isinstance(event, CallEnded):
                self._imports.take(event)
                self._settle(event.host)
        elif isinstance(event, Importing):
            self._imports.take(event)
            self._waiting += 1
        elif isinstance(event, (Notice, Stalled, FilesWritten)):
            self._say("stderr", f"{clean_lines(str(event))}\n")

    def _output(self, event: Output) -> None:
        if is_noise(event.text):
            return
        bar = self._bars.pop((event.host, event.rank, event.stream), None) if self._bars else None
        # An empty line after a bar only ends it; any other line replaces the bar.
        self._say(event.stream, self.line(event if bar is None or event.text else bar))

    def _settle(self, host: str | None = None) -> None:
        """Writes the progress bars of a host, or of all, as they are: nothing will update them again."""
        for key, bar in list(self._bars.items()):
            if host in (None, bar.host):
                del self._bars[key]
                self._say(bar.stream, self.line(bar))

    def _say(self, stream: str, line: str) -> None:
        self._lines.append((stream, line))
        self._waiting += len(line) + _OVERHEAD
        while self._behind and self._waiting > _MOST and self._lines:
            self._waiting -= len(self._lines.popleft()[1]) + _OVERHEAD
            self._dropped += 1

    def line(self, event: Output) -> str:
        """A line of a worker as it is shown."""
        return f"{self._prefix(event)} {clean(event.text, colour=self._has_colours)}\n"

    def _prefix(self, event: Output) -> str:
        return located(event.host, event.rank)

    def _bar(self, event: Output) -> None:
        """A worker's progress bar changed."""
        self._waiting += 1

    @abstractmethod
    def _state(self, event: HostState, before: State | None) -> None:
        """A host's state changed."""

    @abstractmethod
    def _moved(self, event: Moved) -> None:
        """A transfer to a host made progress."""

    @abstractmethod
    def _step(self, event: Step) -> None:
        """A transfer is being prepared."""

    @abstractmethod
    def _running(self, event: CallStarted | CallEnded | Mapped) -> None:
        """A call started or ended, or a map made progress."""

    # ---- output

    def flush(self) -> None:
        """Writes everything so far."""
        with self._writing:
            with self._lock:
                lines, self._waiting = list(self._lines), 0
                self._lines.clear()
                if self._dropped:
                    lines.insert(0, ("stderr", f"skyfab: {self._dropped} lines dropped: the output was not read\n"))
                    self._dropped = 0
            is_closed = False
            if not self._deaf:
                try:
                    self._write(lines)
                except Exception as error:  # a closed pipe (`| head`) or file, or what a program made sys.stdout
                    self._deaf = True
                    is_closed = isinstance(error, BrokenPipeError)
            with self._progress:
                self._behind = False
                self._progress.notify_all()
        if is_closed and not self.unread.done():
            self.unread.set_result(None)

    def _finish(self) -> None:
        """Waits until everything so far is written, unless the output is behind."""
        with self._progress:
            self._asked += 1
            ticket = self._asked
        self._urgent.set()
        self._soon()
        with self._progress:
            if not self._behind:
                self._behind = not self._progress.wait_for(
                    lambda: self._written >= ticket or self._over.is_set(), self._timeout
                )

    @abstractmethod
    def _write(self, lines: list[Line]) -> None: ...

    def close(self) -> None:
        """Writes the rest, and nothing afterwards."""
        self._over.set()
        self._wake.set()
        self._urgent.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self._settle()
        self.flush()

    def _soon(self) -> None:
        self._wake.set()
        with self._lock:
            if self._thread is None and not self._over.is_set():
                self._thread = threading.Thread(target=self._run, name="skyfab-ui", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            self._wake.wait(self._restless())
            self._wake.clear()
            self._urgent.wait(self._pace())
            self._urgent.clear()
            asked = self._asked
            self.flush()
            with self._progress:
                self._written = asked
                self._progress.notify_all()

    def _pace(self) -> float:
        """Seconds for which text is collected before it is written."""
        return _PACE

    def _restless(self) -> float | None:
        """Interval in seconds of redrawing without events, for animation; None: no redrawing."""
        return None


class Plain(View):
    """Plain lines for files and pipes: ``node1[0] text``, each to the stream that it was written to.

    The files are looked up at every write, as `print` does.
    """

    def __init__(self, clock: Callable[[], float], timeout: float = TIMEOUT) -> None:
        super().__init__(clock, timeout)
        self._shown: dict[tuple[str | int | None, ...], float] = {}
        self._told: list[Importing] = []
        """Imports that have a line."""

    def _bar(self, event: Output) -> None:
        """Shows a progress bar every few seconds. Its last state is always shown, with the next line or at the end."""
        if self._is_due(event.host, event.rank):
            self._say(event.stream, self.line(event))

    def _state(self, event: HostState, before: State | None) -> None:
        if event.state == "preparing" and event.detail:
            self._say("stderr", clean(f"{event.host}: {event.detail}") + "\n")
        is_trouble = event.state in ("failed", "lost", "reconnecting")
        if is_trouble or (event.state, before) in (("ready", "reconnecting"), ("ready", "preparing")):
            self._say("stderr", clean(str(event)) + "\n")

    def _moved(self, event: Moved) -> None:
        """Shows progress every few seconds."""
        if self._is_due(event.host, None):
            self._say("stderr", clean(str(event)) + "\n")

    def _step(self, event: Step) -> None:
        if event.text and self._is_due(event.host, None):
            self._say("stderr", clean(str(event)) + "\n")

    def _running(self, event: CallStarted | CallEnded | Mapped) -> None:
        """Shows a map's progress every few seconds."""
        is_running = isinstance(event, Mapped) and not event.failed and event.done < event.total
        if is_running and self._is_due(event.function, -1):
            self._say("stderr", clean(str(event)) + "\n")

    def _is_due(self, *key: str | int | None) -> bool:
        """Whether the last line for this key is some seconds old."""
        now = self._clock()
        due = now - self._shown.setdefault(key, now) >= _SPARSE
        if due:
            self._shown[key] = now
        return due

    def flush(self) -> None:
        with self._lock:
            long = self._imports.since(_LONG)
            for event in long:
                if event not in self._told:
                    self._say("stderr", clean(str(event)) + "\n")
            self._told = long
        super().flush()

    def _restless(self) -> float | None:
        return _LONG / 4 if len(self._imports) > len(self._told) else None

    def _write(self, lines: list[Line]) -> None:
        put_lines(lines)


def put_lines(lines: list[Line]) -> None:
    """Writes each line to its own stream."""
    for stream, group in itertools.groupby(lines, key=lambda line: line[0]):
        put(getattr(sys, stream), "".join(text for _, text in group))
