"""Runs a broadcast and watches the keyboard: `d`, pressed alone and confirmed, detaches it, so that it continues.

What is typed ahead is for the shell that follows. So the terminal stays in its line mode, where nothing can be read
before a line is complete, and `d` is made a character that completes a line: a line of one character is a lone `d`, or
Enter, which means nothing to a shell. After other keys `d` is for the shell, too.
"""

from __future__ import annotations

import array
import fcntl
import os
import select
import shlex
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from skyfab.calls.call import Call
from skyfab.cli import run_history
from skyfab.detached.run import Run
from skyfab.pool.compute import Compute
from skyfab.pool.futures import note_stopped
from skyfab.ui.events import Events, Question
from skyfab.ui.hints import HINTS
from skyfab.ui.prompt import TERMINAL

R = TypeVar("R")

_ALONE: Final = 0.3
"""Seconds in which no other key follows a lone one."""
_PACE: Final = 0.1


def broadcast(compute: Compute, call: Call[R], *, name: str) -> list[R] | Run:
    """``call @ compute``; if the user presses `d` meanwhile and confirms, detaches it and returns the run."""
    if not _is_at_terminal():
        return compute.broadcast(call)
    print("press d to detach: it keeps running when this program ends", file=sys.stderr)
    future: Future[Any] = compute.submit(call, on="all")
    try:
        with _watched() as watch, compute.events.waiting:
            while not future.done():
                is_pressed = TERMINAL.is_attended() and watch.is_pressed()
                if is_pressed and watch.confirms(future.done, compute.events) and not future.done():
                    return compute.detach(name=name)
                time.sleep(_PACE)
    except KeyboardInterrupt as error:
        note_stopped(error, future, compute.hosts)
        raise
    found: list[R] = future.result()
    return found


def _is_at_terminal() -> bool:
    """There is a person at the keyboard, who sees what is printed."""
    return TERMINAL.is_attended() and sys.stderr.isatty()


class _Watch:
    """Looks for the key `d` at the terminal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lines = self._mode(termios.ICANON)
        self._keys = self._mode(0)

    def _mode(self, canonical: int) -> list[Any]:
        mode = termios.tcgetattr(self._fd)
        mode[3] = mode[3] & ~(termios.ECHO | termios.ECHONL | termios.ICANON) | canonical
        control = list(mode[6])
        if canonical:
            control[termios.VEOL], control[termios.VEOL2] = b"d", b"D"
        else:
            control[termios.VMIN], control[termios.VTIME] = 1, 0
        mode[6] = control
        return mode

    def begin(self) -> None:
        termios.tcsetattr(self._fd, termios.TCSADRAIN, self._lines)

    def _resume(self) -> None:
        """Begins again after Ctrl-Z and `fg`: the shell has set the terminal to its own mode."""
        if termios.tcgetattr(self._fd)[3] & termios.ECHO:
            self.begin()

    def _waiting(self) -> int:
        """How many bytes can be read."""
        count = array.array("i", [0])
        fcntl.ioctl(self._fd, termios.FIONREAD, count)
        return count[0]

    def is_pressed(self) -> bool:
        """`d` was pressed, and nothing before or after it. Enter, pressed alone, is dropped."""
        if TERMINAL.is_busy:
            return False
        self._resume()
        if self._waiting() != 1:
            return False
        time.sleep(_ALONE)
        with TERMINAL.drawing() as is_free:
            if not is_free:
                return False
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._keys)  # counts what follows it, too
            try:
                return self._waiting() == 1 and os.read(self._fd, 1) in (b"d", b"D")
            finally:
                self.begin()

    def confirms(self, over: Callable[[], bool], events: Events) -> bool:
        """Asks whether to detach; no, if it is over before there is an answer."""
        events.emit(Question(host="", text="detach? y/n"))
        answer = ""
        termios.tcsetattr(self._fd, termios.TCSADRAIN, self._keys)
        try:
            while not over():
                if select.select([self._fd], [], [], _PACE)[0]:
                    is_yes = self._typed().strip().lower() in (b"y", b"yes")
                    answer = "yes" if is_yes else "no: it goes on here"
                    return is_yes
            return False
        finally:
            self.begin()
            events.emit(Question(host="", text="", answer=answer))

    def _typed(self) -> bytes:
        """What is typed until a pause: a key may be several bytes, and the shell must not get a part of a word."""
        typed = b""
        while select.select([self._fd], [], [], _ALONE)[0] and (data := os.read(self._fd, 1024)):
            typed += data
        return typed


@contextmanager
def _watched() -> Iterator[_Watch]:
    """Watches the terminal. It is as before afterwards, and while keys (Ctrl-Z, Ctrl-\\) stop or end the program."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def restore() -> None:
        if TERMINAL.is_attended():  # in the background the terminal is the shell's
            termios.tcsetattr(fd, termios.TCSADRAIN, before)

    def obey(number: int, _: object) -> None:
        restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, obey)  # it goes on after Ctrl-Z

    keys = [number for number in (signal.SIGTSTP, signal.SIGQUIT) if signal.getsignal(number) is signal.SIG_DFL]
    watch = _Watch(fd)
    watch.begin()
    try:
        for number in keys:
            signal.signal(number, obey)
        yield watch
    finally:
        for number in keys:
            signal.signal(number, signal.SIG_DFL)
        restore()


def tell_how_to_attach(run: Run, name: str | None = None) -> None:
    """Prints the commands for a detached run, with the `name` that the user gave it, and its id to stdout."""
    short = run.id[:8]
    run_history.note(run.id, run.name)
    print(f"run {short} keeps running on {', '.join(run.hosts)}", file=sys.stderr)
    word = short if not name or name.startswith("-") else shlex.quote(name)
    for task in ("attach", "logs", "stop"):
        print(HINTS.adapted(f"  skyfab {task} {word}"), file=sys.stderr)
    print(short, flush=True)
