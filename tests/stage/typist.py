"""A program at a terminal of its own, and what is typed there."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T", bound="Typist")


class Typist:
    """Reads what the program shows, and types when it is asked."""

    def __init__(self, words: Sequence[str], folder: Path, **environ: str) -> None:
        self._ours, theirs = pty.openpty()
        env = {**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environ}
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *words],  # the keys for signals work too
            cwd=folder,
            env=env,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        self._theirs = theirs
        self.said = ""
        self._looked = 0

    def sees(self, pattern: str, timeout: float = 120) -> re.Match[str]:
        """Waits until something new that matches is shown."""
        deadline = time.monotonic() + timeout
        while (match := re.compile(pattern).search(self.said, self._looked)) is None:
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.said!r}"
            assert self._read(0.5) or self.process.poll() is None, f"it ended: {self.said!r}"
        self._looked = match.end()
        return match

    def types(self, text: str) -> None:
        os.write(self._ours, text.encode() + b"\n")

    def presses(self, key: bytes) -> None:
        os.write(self._ours, key)

    def is_quiet(self, seconds: float) -> bool:
        """Nothing is shown for so long."""
        before = self.said
        self._read(seconds)
        return self.said == before

    def echoes(self) -> bool:
        """Whether the terminal shows what is typed."""
        return bool(termios.tcgetattr(self._theirs)[3] & termios.ECHO)

    def ends(self, timeout: float = 120) -> int:
        """Reads until the program has ended, and returns its exit code."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it does not end: {self.said!r}"
            self._read(0.1)
        while self._read(0.05):
            pass
        return self.process.returncode

    def _read(self, seconds: float) -> bool:
        if not select.select([self._ours], [], [], seconds)[0]:
            return False
        self.said += os.read(self._ours, 65536).decode(errors="replace").replace("\r\n", "\n")
        return True

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)
