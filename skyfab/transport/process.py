"""A stream that is a process on this machine: ssh, or the command itself."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import signal
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from skyfab.protocol.pipes import widen

if TYPE_CHECKING:
    from skyfab.protocol.frames import RecvInto
    from skyfab.protocol.streams import Send


class ProcessStream:
    """The pipes of a child process, without blocking.

    It runs in a session of its own: Ctrl-C is for us, and we tell the host in good order.
    """

    def __init__(self, argv: Sequence[str], explain: Callable[[int, str], Exception]) -> None:
        self._explain = explain
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the stream
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            start_new_session=True,
        )
        _STREAMS.add(self)
        assert self._process.stdin and self._process.stdout
        self._in = self._process.stdout.fileno()
        self._out = self._process.stdin.fileno()
        for fd in (self._in, self._out):
            os.set_blocking(fd, False)
            widen(fd)
        # No Python of ours stands between the caller and the system.
        self.recv_into: RecvInto = io.FileIO(self._in, closefd=False).readinto
        self.send: Send = functools.partial(os.writev, self._out)

    def fileno(self) -> int:
        return self._in

    def sink(self) -> int | None:
        return self._out

    def explain(self) -> Exception:
        try:
            code = self._process.wait(2)
        except subprocess.TimeoutExpired:
            code = 0
        return self._explain(code, self.errors())

    def errors(self) -> str:
        """The end of what it has said on stderr."""
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), 65536, max(0, size - 65536)).decode(errors="replace")

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:  # still connecting, or the host does not answer
            self.end(signal.SIGTERM)
            try:
                self._process.wait(2)
            except subprocess.TimeoutExpired:
                self.end(signal.SIGKILL)
                self._process.wait()
        self._errors.close()

    def leave_to_parent(self) -> None:
        """In a forked child: lets go of the pipes, which would keep ssh alive without the parent."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            pipe.close()
        self._process.returncode = 0  # not ours to wait for, or to end

    def end(self, number: int) -> None:
        """Ends the process, with its group: to a host behind others, ssh has a child of its own."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


_STREAMS: Final[weakref.WeakSet[ProcessStream]] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for stream in list(_STREAMS):
        stream.leave_to_parent()
    _STREAMS.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def end_all() -> None:
    """Ends every stream of this program, which ends too: none is left that waits for a host which does not answer."""
    for stream in list(_STREAMS):
        stream.end(signal.SIGTERM)
