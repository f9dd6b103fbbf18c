"""A view: gathers text as events come, and writes it in batches.

Nothing is rendered line by line. A view writes on a thread of its own, and at once when a call ends or a host's state
changes, so that what the program prints next comes after.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from skyfab.events import CallEnded, Event, FilesWritten, HostState, Moved, Notice, Output, Stalled, State
from skyfab.terminal import clean_lines

Line = tuple[str, str]
"""The stream it goes to, and its text with its end."""

_PACE: Final = 0.025
_MOST: Final = 16 * 1024 * 1024
"""Characters that may wait for a slow reader; beyond that whoever speaks waits too."""


class View(ABC):
    """What a person sees of a pool. A subscriber of its events; thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._states: dict[str, State] = {}
        """The last state of each host, in the order of their first."""
        self._bars: dict[tuple[str, int | None, str], Output] = {}
        """Lines that asked to be overwritten, and were not yet: one for each rank and stream."""
        self._lines: list[Line] = []
        self._waiting = 0
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._over = threading.Event()
        self._deaf = False

    # ---- what comes in, all with the lock held

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._take(event)
            waiting = self._waiting
        if waiting > _MOST or (waiting and isinstance(event, (CallEnded, HostState))):
            self.flush()
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
        elif isinstance(event, CallEnded):
            self._settle(event.host)
        elif isinstance(event, (Notice, Stalled, FilesWritten)):
            self._say("stderr", f"{clean_lines(str(event))}\n")

    def _output(self, event: Output) -> None:
        bar = self._bars.pop((event.host, event.rank, event.stream), None) if self._bars else None
        # An empty line after a bar only ends it; any other line takes the bar's place.
        self._say(event.stream, self._line(event if bar is None or event.text else bar))

    def _settle(self, host: str | None = None) -> None:
        """Nobody on this host, or anywhere, will finish their bars: they stay as they are."""
        for key, bar in list(self._bars.items()):
            if host in (None, bar.host):
                del self._bars[key]
                self._say(bar.stream, self._line(bar))

    def _say(self, stream: str, line: str) -> None:
        self._lines.append((stream, line))
        self._waiting += len(line)

    @abstractmethod
    def _line(self, event: Output) -> str:
        """How a rank's line reads."""

    @abstractmethod
    def _bar(self, event: Output) -> None:
        """A rank's bar moved."""

    @abstractmethod
    def _state(self, event: HostState, before: State | None) -> None:
        """A host's state changed."""

    @abstractmethod
    def _moved(self, event: Moved) -> None:
        """Bytes are on their way to a host."""

    # ---- what goes out

    def flush(self) -> None:
        """Writes everything so far."""
        with self._writing:
            with self._lock:
                lines, self._lines, self._waiting = self._lines, [], 0
            if not self._deaf:
                try:
                    self._write(lines)
                except (OSError, ValueError):  # nobody reads any more: `| head`, or a file that was closed
                    self._deaf = True

    @abstractmethod
    def _write(self, lines: list[Line]) -> None: ...

    def close(self) -> None:
        """Writes what is left, and nothing afterwards."""
        self._over.set()
        self._wake.set()
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
            self._over.wait(self._pace())
            self.flush()

    def _pace(self) -> float:
        """Seconds in which text gathers before it is written."""
        return _PACE

    def _restless(self) -> float | None:
        """Seconds after which it changes by itself; None: it does not."""
        return None
