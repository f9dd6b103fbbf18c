"""`Reaper`: a shell script that cleans up when its stdin is at its end, however this process ends."""

from __future__ import annotations

import os
import subprocess
import weakref
from typing import IO, Final


class Reaper:
    """A process whose stdin is held open by this one. It prints to `stdout`."""

    def __init__(self, script: str, *words: str, cwd: str | os.PathLike[str] = ".") -> None:
        """`words` are $0, $1 … of the script."""
        self._process = subprocess.Popen(
            ["sh", "-c", script, *words],
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # neither Ctrl-C nor the end of a terminal ends it
            bufsize=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self.stdin: IO[bytes] = self._process.stdin
        self.stdout: IO[bytes] = self._process.stdout
        _all.add(self)

    def close(self) -> None:
        """Lets go, and returns when the process has cleaned up."""
        _all.discard(self)
        self.stdin.close()
        try:
            self._process.wait()
        finally:
            self.stdout.close()


_all: Final[weakref.WeakSet[Reaper]] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    """In a forked child: it may outlive its parent, whose end is the one that counts."""
    for reaper in list(_all):
        reaper.stdin.close()


os.register_at_fork(after_in_child=_leave_all_to_parent)
