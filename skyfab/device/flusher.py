"""Sends what is buffered in the streams of devices, a few milliseconds later."""

from __future__ import annotations

import os
import threading
import time
from typing import Final, Protocol

_INTERVAL: Final = 0.003
_IDLE_INTERVAL: Final = 0.05
_IDLE_AFTER: Final = 1.0
"""Seconds between two flushes: while there are instructions, and after `_IDLE_AFTER` seconds without any."""


class Flushable(Protocol):
    """The stream of a device, as the flusher sees it."""

    @property
    def index(self) -> int:
        """The device's index in torch."""

    @property
    def is_lost(self) -> bool:
        """Whether the device can no longer be used."""

    def try_flush(self) -> bool:
        """Sends what waits. Returns whether there was something."""

    def flush(self) -> object:
        """Sends what waits. Raises the error of an earlier instruction."""

    def leave_to_parent(self) -> None:
        """This process was forked."""


class _Flusher:
    """Sends instructions that have waited for a few milliseconds, for all devices. One thread."""

    def __init__(self) -> None:
        self._streams: list[Flushable] = []
        self._lock = threading.Lock()
        self._is_running = False

    def watch(self, stream: Flushable) -> None:
        with self._lock:
            self._streams.append(stream)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="skyfab-device", daemon=True).start()

    def watched(self) -> list[Flushable]:
        with self._lock:
            return [stream for stream in self._streams if not stream.is_lost]

    def _open_streams(self) -> list[Flushable]:
        with self._lock:
            self._streams = [stream for stream in self._streams if not stream.is_lost]
            self._is_running = bool(self._streams)
            return self._streams

    def _run(self) -> None:
        last = time.monotonic()
        while streams := self._open_streams():
            found = False
            for stream in streams:
                found |= stream.try_flush()
            now = time.monotonic()
            if found:
                last = now
            time.sleep(_INTERVAL if now - last < _IDLE_AFTER else _IDLE_INTERVAL)

    def forked(self) -> None:
        """This is a child process: it has neither the thread nor the devices."""
        streams, self._streams = self._streams, []
        self._lock = threading.Lock()
        self._is_running = False
        for stream in streams:
            stream.leave_to_parent()


_flusher: Final = _Flusher()
os.register_at_fork(after_in_child=_flusher.forked)


watch: Final = _flusher.watch


def open_streams() -> list[Flushable]:
    """The streams of all devices that can be used."""
    return _flusher.watched()
