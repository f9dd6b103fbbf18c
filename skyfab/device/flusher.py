"""Sends what waits in the streams of devices, a few milliseconds later."""

from __future__ import annotations

import os
import threading
import time
from typing import Final, Protocol

_TICK: Final = 0.003
_IDLE_TICK: Final = 0.05
_IDLE_AFTER: Final = 1.0
"""Seconds between looks at instructions that wait: while there are some, and when there have been none for a while."""


class Stream(Protocol):
    """The stream of a device, as the ticker sees it."""

    @property
    def index(self) -> int:
        """The device's index in torch."""

    @property
    def is_lost(self) -> bool:
        """Whether the device can no longer be used."""

    def tick(self) -> bool:
        """Sends what waits. Returns whether there was something."""

    def flush(self) -> object:
        """Sends what waits. Raises the error of an earlier instruction."""

    def leave_to_parent(self) -> None:
        """This process was forked."""


class _Ticker:
    """Sends instructions that have waited for a few milliseconds, for all devices. One thread."""

    def __init__(self) -> None:
        self._streams: list[Stream] = []
        self._lock = threading.Lock()
        self._is_running = False

    def watch(self, stream: Stream) -> None:
        with self._lock:
            self._streams.append(stream)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="skyfab-device", daemon=True).start()

    def watched(self) -> list[Stream]:
        with self._lock:
            return [stream for stream in self._streams if not stream.is_lost]

    def _open_streams(self) -> list[Stream]:
        with self._lock:
            self._streams = [stream for stream in self._streams if not stream.is_lost]
            self._is_running = bool(self._streams)
            return self._streams

    def _run(self) -> None:
        last = time.monotonic()
        while streams := self._open_streams():
            found = False
            for stream in streams:
                found |= stream.tick()
            now = time.monotonic()
            if found:
                last = now
            time.sleep(_TICK if now - last < _IDLE_AFTER else _IDLE_TICK)

    def forked(self) -> None:
        """This is a child process: it has neither the thread nor the devices."""
        streams, self._streams = self._streams, []
        self._lock = threading.Lock()
        self._is_running = False
        for stream in streams:
            stream.leave_to_parent()


_ticker: Final = _Ticker()
os.register_at_fork(after_in_child=_ticker.forked)


watch: Final = _ticker.watch


def open_streams() -> list[Stream]:
    """The streams of all devices that can be used."""
    return _ticker.watched()
