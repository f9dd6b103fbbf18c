"""`FullScreen`: the whole terminal for one program: its alternate screen, its keys, and how it is given back."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import termios
from collections.abc import Sequence
from types import FrameType
from typing import Any, Final

from skyfab.inspect.top.keys import decode, is_partial
from skyfab.ui.prompt import TERMINAL
from skyfab.ui.terminal import put

_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
"""The alternate screen, no cursor, no wrapping of lines, nothing on it."""
_LEAVE: Final = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
_REST: Final = 0.05
"""Seconds in which the rest of a key arrives."""
_BUSY: Final = 0.1
"""Seconds between checks whether a question has been answered."""


class FullScreen:
    """Takes the terminal inside the block, and gives it back at its end, and while the program is stopped (Ctrl-Z)."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno()
        self._before: list[Any] = []
        self._drawn: list[str] = []
        self._size = (0, 0)
        self._asked = TERMINAL.spent
        self._wakes, self._wake = -1, -1
        self._is_stopping = False
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> FullScreen:
        self._wakes, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._before = termios.tcgetattr(self._fd)
        try:
            self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._stop)
            self._handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, self._resized)
            self._take()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._wakes)
        os.close(self._wake)

    def _take(self) -> None:
        mode = [*self._before[:6], list(self._before[6])]
        mode[3] &= ~(termios.ECHO | termios.ECHONL | termios.ICANON)  # signals stay: Ctrl-C and Ctrl-Z
        mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
        termios.tcsetattr(self._fd, termios.TCSADRAIN, mode)
        self._drawn = []
        put(sys.stdout, _ENTER)

    def _give_back(self) -> None:
        try:
            put(sys.stdout, _LEAVE)
        finally:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: noted only, since the signal may come in the middle of a write."""
        self._is_stopping = True
        self._wake_up()

    def _suspend(self) -> None:
        """Stops the program as the shell expects; goes on here after `fg`."""
        self._is_stopping = False
        self._give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)  # to this thread: another one could take it too late
        signal.signal(signal.SIGTSTP, self._stop)
        self._before = termios.tcgetattr(self._fd)
        self._take()

    def _resized(self, number: int, frame: FrameType | None) -> None:
        self._wake_up()

    def _wake_up(self) -> None:
        try:
            os.write(self._wake, b".")
        except BlockingIOError:
            pass  # it is woken up already

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        size = shutil.get_terminal_size()
        return max(size.columns, 20), max(size.lines, 5)

    def keys(self, timeout: float) -> list[str]:
        """The keys that are pressed within a time; fewer, also none, when the screen is to be drawn earlier."""
        if TERMINAL.is_busy:  # what is typed answers a question
            select.select([self._wakes], [], [], _BUSY)
            return []
        ready, _, _ = select.select([self._fd, self._wakes], [], [], timeout)
        if self._wakes in ready:
            os.read(self._wakes, 4096)
        if self._is_stopping:
            self._suspend()
            return []
        if self._fd not in ready or TERMINAL.is_busy:
            return []
        data = os.read(self._fd, 1024)
        if not data:
            raise KeyboardInterrupt  # the terminal is gone
        while is_partial(data) and select.select([self._fd], [], [], _REST)[0]:
            data += os.read(self._fd, 1024)
        keys = decode(data)
        if "redraw" in keys:
            self._drawn = []
        return keys

    def draw(self, lines: Sequence[str]) -> None:
        """Shows these lines; writes only those that have changed."""
        with TERMINAL.drawing() as may_draw:
            if not may_draw:
                return
            if (self._size, self._asked) != (self.size, TERMINAL.spent):
                self._size, self._asked, self._drawn = self.size, TERMINAL.spent, []
            text = "" if self._drawn else "\x1b[2J"
            for number, line in enumerate(lines):
                if number >= len(self._drawn) or self._drawn[number] != line:
                    text += f"\x1b[{number + 1};1H{line}"
            self._drawn = list(lines)
            if text:
                put(sys.stdout, text)
