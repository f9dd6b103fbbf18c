"""SIGTERM to the `skyfab` command: it ends as Ctrl-C does. Programs that import skyfab keep their own handlers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final


class Sigterm:
    """Whether the signal has come."""

    code: Final = 128 + signal.SIGTERM
    """What a shell calls a program that was ended by it."""

    def __init__(self) -> None:
        self.came = False

    @contextmanager
    def as_interrupt(self) -> Iterator[None]:
        """Calls are stopped, pools are closed and hosts left clean when it comes."""
        self.came = False
        if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
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
        if not callable(on_interrupt):  # a shell script's background jobs ignore SIGINT, and must heed SIGTERM
            raise KeyboardInterrupt
        on_interrupt(signal.SIGINT, frame)  # it knows the moments that must not be interrupted


SIGTERM: Final = Sigterm()
