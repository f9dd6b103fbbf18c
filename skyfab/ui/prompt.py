"""Prompts the user at the terminal: one prompt at a time, and nothing is drawn meanwhile."""

from __future__ import annotations

import os
import select
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from skyfab.errors import UsageError, printable

_PACE: Final = 100
"""Milliseconds between checks whether the answer is still wanted."""


class Terminal:
    """The terminal of this program, on which questions and drawing take turns. Thread-safe."""

    def __init__(self) -> None:
        self._drawing = threading.Lock()
        self._one = threading.Lock()
        self._since: float | None = None
        self._spent = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a question is being asked."""
        return self._since is not None

    @property
    def spent(self) -> float:
        """Seconds in which questions were asked so far. No host has to answer within them."""
        since = self._since
        return self._spent + (0.0 if since is None else time.monotonic() - since)

    @contextmanager
    def drawing(self) -> Iterator[bool]:
        """While the block runs no question begins; it may draw unless False is given: then one is being asked."""
        with self._drawing:
            yield not self.is_busy

    def is_attended(self) -> bool:
        """Whether a person can be asked: not in the background, where reading the terminal would stop the program."""
        try:
            fd = sys.stdin.fileno()
            if not os.isatty(fd):
                return False
            with suppress(OSError):  # it is not the terminal that controls this program: there is no background
                return os.tcgetpgrp(fd) == os.getpgrp()
            return True
        except (AttributeError, OSError, ValueError):  # no stdin, a closed one, or one that is not a file
            return False

    def ask(self, question: str, stopped: Callable[[], bool] = lambda: False, *, echo: bool = False) -> str | None:
        """Reads a line; what is typed is shown with `echo`. None: at end of file, or when `stopped` became true."""
        with self._one:
            if stopped() or not self.is_attended():
                return None
            with self._drawing:
                self._since = time.monotonic()
            try:
                with _line_mode(echo=echo) as fd:
                    return _read(fd, question, stopped, echo=echo)
            finally:
                self._spent, self._since = self.spent, None


TERMINAL: Final = Terminal()


def answer(question: str, hint: str) -> str:
    """Reads a line that is shown as it is typed. The end of input (Ctrl-D) ends it as Ctrl-C does.

    Raises UsageError, with what to do instead, if there is no terminal.
    """
    if not sys.stdin.isatty():
        raise UsageError("prompts need a terminal", hint=hint)
    try:
        return input(question).strip()
    except EOFError:
        raise KeyboardInterrupt from None


@contextmanager
def _line_mode(*, echo: bool) -> Iterator[int]:
    """A descriptor of the terminal, in line mode; afterwards it is as it was."""
    fd = os.open(os.ttyname(sys.stdin.fileno()), os.O_RDWR | os.O_NOCTTY)
    try:
        before = termios.tcgetattr(fd)
        mode: list[Any] = [*before[:6], list(before[6])]
        mode[3] = mode[3] & ~(termios.ECHO | termios.ECHONL) | termios.ICANON | termios.ISIG
        mode[3] |= termios.ECHO if echo else 0
        termios.tcsetattr(fd, termios.TCSAFLUSH, mode)
        try:
            yield fd
        finally:
            termios.tcsetattr(fd, termios.TCSADRAIN, before)
    finally:
        os.close(fd)


def _read(fd: int, question: str, stopped: Callable[[], bool], *, echo: bool) -> str | None:
    # The cursor is on the first of the live lines: they are erased. Text of a host must not control the terminal.
    erase = "\r\x1b[J" if os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown") else ""
    _write(fd, erase + " ".join(printable(question).split()) + " ")
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    line = b""
    try:
        while not stopped():
            if poll.poll(_PACE):
                line += os.read(fd, 4096)
                if not line.endswith(b"\n"):
                    return None
                return line[:-1].decode(errors="surrogateescape")
        return None
    finally:
        if not (echo and line.endswith(b"\n")):  # else the terminal has shown it
            _write(fd, "\n")


def _write(fd: int, text: str) -> None:
    os.write(fd, text.encode(errors="replace"))
