"""Makes SIGTERM stop the `skyfab` command as Ctrl-C does. Programs that import skyfab keep their own handlers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final


class Sigterm:
    """Handles SIGTERM, and records whether it was received."""

    code: Final = 128 + signal.SIGTERM
    """The exit code of a program that was terminated by it."""

    def __init__(self) -> None:
        self.came = False

    @contextmanager
    def as_interrupt(self) -> Iterator[None]:
        """Inside this context SIGTERM acts as Ctrl-C: calls are stopped and pools are closed."""
        self.came = False
        if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
            yield
            return
        before = signal.signal(signal.SIGTERM, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        on_interrupt = signal.getsignal(signal.SIGINT)
        if not callable(on_interrupt):  # background jobs of a shell script ignore SIGINT, but not SIGTERM
            raise KeyboardInterrupt
        on_interrupt(signal.SIGINT, frame)  # it defers the interrupt in critical sections


SIGTERM: Final = Sigterm()
