"""`Pipe`: a raw command over ssh, with the fastest possible transfer of bytes from Python. Used for baselines."""

from __future__ import annotations

import fcntl
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

_F_SETPIPE_SZ: Final = 1031
_PIPE: Final = 1024 * 1024


class Pipe:
    """The unbuffered stdin and stdout of a process. Leaving `with` closes both and waits for its exit."""

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
        """Starts the process, by default with this program's environment and current folder."""
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=env, cwd=cwd
        )
        assert self._process.stdin and self._process.stdout
        self._in = self._process.stdin.fileno()
        self._out = self._process.stdout.fileno()
        for fd in (self._in, self._out):
            with suppress(OSError):
                fcntl.fcntl(fd, _F_SETPIPE_SZ, _PIPE)

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *exc: object) -> None:
        self.finish()
        assert self._process.stdout
        self._process.stdout.close()
        self._process.wait()

    def echo(self, message: bytes) -> None:
        """Sends a message and waits until all of it has been received back."""
        os.write(self._in, message)
        missing = len(message)
        while missing:
            missing -= len(self._some(missing))

    def line(self) -> bytes:
        """The next line, read byte by byte: the rest stays in the pipe."""
        found = b""
        while not found.endswith(b"\n"):
            found += self._some(1)
        return found

    def rest(self) -> bytes:
        """Closes its input; returns all output until it exits."""
        self.finish()
        assert self._process.stdout
        return self._process.stdout.read()

    def _some(self, most: int) -> bytes:
        data = os.read(self._out, most)
        if not data:
            raise EOFError(f"{self._process.args!r:.200} ended with {self._process.wait()}")
        return data

    def exchange(self, source: memoryview, sink: memoryview) -> float:
        """Sends all of `source` and fills `sink` at the same time; returns the seconds."""
        started = time.perf_counter()
        writer = threading.Thread(target=self.send, args=(source,))
        writer.start()
        self.receive(sink)
        writer.join()
        return time.perf_counter() - started

    def send(self, source: memoryview) -> None:
        while source:
            source = source[os.write(self._in, source[: 4 * _PIPE]) :]

    def receive(self, sink: memoryview) -> None:
        done = 0
        while done < len(sink):
            with sink[done : done + 4 * _PIPE] as room:
                got = os.readv(self._out, [room])
            if not got:
                raise EOFError(f"{self._process.args!r:.200} ended with {self._process.wait()}")
            done += got

    def finish(self) -> None:
        """Closes its input."""
        assert self._process.stdin
        if not self._process.stdin.closed:
            self._process.stdin.close()

    def wait(self) -> None:
        """Closes its input and waits until the process exits."""
        self.finish()
        self._process.wait()
