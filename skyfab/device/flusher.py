"""A thread that sends instructions of all devices a few milliseconds later, if nothing else has sent them."""

from __future__ import annotations

import os
import threading
import time
from typing import Final

from skyfab._util.signals import SIGNAL_GUARD
from skyfab.device.stream import DeviceStream, open_streams

_INTERVAL: Final = 0.003
_IDLE_INTERVAL: Final = 0.05
_IDLE_AFTER: Final = 1.0
"""Seconds between two flushes: while there are instructions, and after `_IDLE_AFTER` seconds without any."""


class _Flusher:
    """Sends instructions that have waited for a few milliseconds, for all devices. One thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_running = False

    def start(self) -> None:
        """There is a new device."""
        with SIGNAL_GUARD, self._lock:
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="skyfab-device", daemon=True).start()

    def _next_streams(self) -> list[DeviceStream]:
        """The devices that can be used. The thread ends if there are none."""
        with self._lock:
            found = open_streams()
            self._is_running = bool(found)
            return found

    def _run(self) -> None:
        last = time.monotonic()
        while found := self._next_streams():
            flushed = [_flush(stream) for stream in found]
            now = time.monotonic()
            if any(flushed):
                last = now
            time.sleep(_INTERVAL if now - last < _IDLE_AFTER else _IDLE_INTERVAL)

    def forked(self) -> None:
        """This is a child process: it has neither the thread nor the devices."""
        self._lock = threading.Lock()
        self._is_running = False
        for stream in open_streams():
            stream.leave_to_parent()


def _flush(stream: DeviceStream) -> bool:
    """Whether there was something to send. What cannot be sent is raised by the next use of the device."""
    try:
        return stream.try_flush()
    except Exception:
        return False


flusher: Final = _Flusher()
os.register_at_fork(after_in_child=flusher.forked)
