"""`FullScreen`: uses the whole terminal: its alternate screen and its keys, and restores it at the end."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from skyfab.ui.prompt import TERMINAL
from skyfab.ui.terminal import put

_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
"""The alternate screen, no cursor, no wrapping of lines, nothing on it."""
_LEAVE: Final = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
_REST: Final = 0.05
"""Seconds in which the rest of a key arrives."""
_BUSY: Final = 0.1
"""Seconds between checks whether a question has been answered."""

_KEY: Final = re.compile(rb"\x1b[\[O][0-9;?]*[ -/]*[@-~]|\x1b|[\x00-\x7f]|[\x80-\xff]+")
_PARTIAL: Final = re.compile(rb"\x1b(?:[\[O][0-9;?]*)?\Z")
_LETTERS: Final = {"A": "up", "B": "down", "C": "right", "D": "left", "H": "home", "F": "end", "M": "enter", "Z": "tab"}
_NUMBERS: Final = {1: "home", 4: "end", 5: "pageup", 6: "pagedown", 7: "home", 8: "end"}
_NAMES: Final = {
    **{f"\x1b{lead}{letter}": name for lead in "[O" for letter, name in _LETTERS.items()},
    **{f"\x1b[{number}~": name for number, name in _NUMBERS.items()},
    "\r": "enter",
    "\n": "enter",
    "\t": "tab",
    "\x1b": "escape",
    "\x1a": "suspend",
}


def decode(data: bytes) -> list[str]:
    """The names of special keys, and other characters as they are; unknown sequences are left out.

    >>> decode(b"j\\x1b[A\\x1bOB\\x1b[6~\\x1b[1;5Cq\\x1b")
    ['j', 'up', 'down', 'pagedown', 'q', 'escape']
    """
    keys = [key.decode(errors="ignore") for key in _KEY.findall(data)]
    return [_NAMES.get(key, key) for key in keys if key in _NAMES or key.isprintable()]


class FullScreen:
    """Takes the terminal inside the block, and gives it back at its end, and while the program is stopped (Ctrl-Z)."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno()
        self._before: list[Any] = []
        self._drawn: tuple[str, float] = ("", 0.0)
        self._enter = _ENTER

    def __enter__(self) -> FullScreen:
        self._before = termios.tcgetattr(self._fd)
        mode = [*self._before[:6], list(self._before[6])]
        mode[3] &= ~(termios.ECHO | termios.ECHONL | termios.ICANON)
        mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
        mode[6][termios.VSUSP] = bytes([os.fpathconf(self._fd, "PC_VDISABLE")])  # a key like others: see `keys`
        try:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, mode)
            put(sys.stdout, self._enter)
        except BaseException:
            self.__exit__()
            raise
        self._drawn = ("", 0.0)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            put(sys.stdout, _LEAVE)
        finally:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Shows the terminal's own screen in the block, for text that scrolls; keys are still read."""
        put(sys.stdout, _LEAVE)
        self._enter = ""
        try:
            yield
        finally:
            self._enter = _ENTER
            self._drawn = ("", 0.0)
            put(sys.stdout, _ENTER)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        size = shutil.get_terminal_size()
        return max(size.columns, 20), max(size.lines, 5)

    def keys(self, timeout: float) -> list[str]:
        """The keys that are pressed within a time. At Ctrl-Z stops the program, and continues after `fg`."""
        if TERMINAL.is_busy:  # what is typed answers a question
            time.sleep(_BUSY)
            return []
        if not select.select([self._fd], [], [], timeout)[0] or TERMINAL.is_busy:
            return []
        data = os.read(self._fd, 1024)
        if not data:
            raise KeyboardInterrupt  # the terminal is gone
        while _PARTIAL.search(data) and select.select([self._fd], [], [], _REST)[0]:
            data += os.read(self._fd, 1024)
        keys = decode(data)
        if "suspend" in keys:
            self.__exit__()
            signal.raise_signal(signal.SIGTSTP)  # to this thread: another one could take it too late
            self.__enter__()
        return keys

    def draw(self, lines: Sequence[str]) -> None:
        """Shows these lines, which fill the screen."""
        with TERMINAL.drawing() as may_draw:
            now = ("\x1b[H" + "\r\n".join(lines), TERMINAL.spent)  # a question was asked on the same screen
            if may_draw and now != self._drawn:
                self._drawn = now
                put(sys.stdout, now[0])
