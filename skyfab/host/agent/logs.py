"""Captures a worker's stdout and stderr: stores them in a file on the host and forwards them to the client.

The file is the buffer: when the client is slow or disconnected, the worker continues, and forwarding catches up from
the file later.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import termios

from skyfab.protocol.messages import Log
from skyfab.protocol.pipes import ROOM, widen

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from typing import Final

    from skyfab.host.agent.run_folder import LogTimes, RunFolder
    from skyfab.protocol.mux import Mux

_ROOM: Final = 1024 * 1024
"""Bytes that may be queued for the connection; the rest waits in the file."""
_LARGE: Final = 64 * 1024 * 1024
"""Bytes after which the log file is rotated; the last two files are kept."""
_MOST: Final = 1024 * 1024 * 1024
"""Bytes that may wait in the file. A process that writes more than its client receives is blocked then."""


def note(text: str) -> None:
    """Writes a line to the agent's own log. A full disk must not end the agent."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))


class LogPipe:
    """The agent's end of one worker's stdout or stderr."""

    def __init__(self, mux: Mux | RunFolder, stream: int, path: str, *, worker: str, fd: int) -> None:
        self.source, self.sink = os.pipe()
        os.set_blocking(self.source, False)
        widen(self.source)  # so that a burst of lines does not block the worker
        self._mux = mux
        self._path = path
        self._stream = stream
        self._file, self._size = -1, 0
        self._open()
        self.end = self._sent = 0
        """Bytes of output so far, in the file or forwarded."""
        self._lost = 0
        """Bytes that a full disk did not take, and that the log does not mention yet."""
        self.hung_up = False
        self._unkept = b""
        """Output that neither the file nor the connection could take."""
        self._announce: bytes | None = Log(worker=worker, fd=fd).encode()
        self.times: LogTimes | None = None
        """When it was written; only in detached runs."""

    def _open(self) -> None:
        with contextlib.suppress(OSError):
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            self._size = os.fstat(self._file).st_size

    def drain(self) -> bool:
        """Reads once from the pipe. Returns False at end of file: all writers have closed it.

        It reads at most a pipe's capacity, so that a process that writes all the time does not block the agent.
        """
        if self.stopped:
            return True
        try:
            data = os.read(self.source, ROOM)
        except BlockingIOError:
            return True
        if data:
            self._keep(data)
        return bool(data)

    def _keep(self, data: bytes) -> None:
        if self._sent == self.end and self._mux.queued(self._stream) < _ROOM:
            if not self.hung_up:  # else the next process may write to the file already
                self._store(data)
            self._forward(data)
            self.end = self._sent = self.end + len(data)
            if self._size > _LARGE:
                self._turn_over()
        else:
            self._unkept = self._write(data)  # if any: the disk is full and the client is behind, so the process waits
            self.end += len(data) - len(self._unkept)

    def _store(self, data: bytes) -> None:
        """Writes what is forwarded without the file. After a full disk, the log continues with a whole line."""
        if self.times is not None:
            self.times.note(self._size)
        if self._lost:
            cut, newline, data = data.partition(b"\n")
            self._lost += len(cut + newline)
            if not newline or not self._note_loss():
                self._lost += len(data)
                return
        self._lost = len(self._write(data))

    def _note_loss(self) -> bool:
        """Says in the log how much is missing. Returns False if there is no space for that either."""
        return not self._write(b"[skyfab: the disk was full: %d bytes of output are missing here]\n" % self._lost)

    def _turn_over(self) -> None:
        """Rotates the log file, and deletes the one before the last."""
        with contextlib.suppress(OSError):
            os.rename(self._path, f"{self._path}.1")
            os.close(self._file)
            self._file, self._size = -1, 0
            self._open()
            if self.times is not None:
                self.times.turn_over()

    def _write(self, data: bytes) -> bytes:
        """Returns what was not written, because the disk is full."""
        if self._file < 0:
            self._open()
        view = memoryview(data)
        with contextlib.suppress(OSError):
            while view:
                view = view[os.write(self._file, view) :]
        self._size += len(data) - len(view)
        return bytes(view)

    @property
    def stopped(self) -> bool:
        """Whether reading is suspended until the client has caught up."""
        return bool(self._unkept) or self.end - self._sent > _MOST

    @property
    def written(self) -> int:
        """Bytes that processes have written so far: those in `end`, and those that wait to be read or kept."""
        unread = b"" if self.hung_up else fcntl.ioctl(self.source, termios.FIONREAD, bytes(4))
        return self.end + len(self._unkept) + int.from_bytes(unread, sys.byteorder)

    def is_sent(self, mark: int) -> bool:
        """Whether everything up to `mark` has been given to the connection."""
        return self._sent - self._mux.queued(self._stream) >= mark

    @property
    def waiting(self) -> bool:
        """Whether something that was read has not been given to the connection."""
        return self._sent < self.end or bool(self._unkept) or self._mux.queued(self._stream) > 0

    def catch_up(self) -> bool:
        """Forwards as much of the file as the connection accepts. Returns whether it forwarded anything."""
        before = self._sent
        while self._sent < self.end and self._mux.queued(self._stream) < _ROOM:
            behind = self.end - self._sent  # it is at the end of the file
            data = os.pread(self._file, min(256 * 1024, behind), self._size - behind)
            if not data:
                break
            self._forward(data)
            self._sent += len(data)
        if self._unkept and self._sent == self.end and self._mux.queued(self._stream) < _ROOM:
            data, self._unkept = self._unkept, b""
            self._keep(data)
        return self._sent > before

    def _forward(self, data: bytes) -> None:
        if self._announce is not None:
            self._mux.send(self._stream, self._announce, large=True)
            self._announce = None
        self._mux.send_data(self._stream, data)

    def move(self, path: str, record: RunFolder) -> None:
        """Continues in the folder of a detached run, without forwarding."""
        with contextlib.suppress(OSError):
            os.rename(self._path, path)
        self._path = path
        self._mux = record
        self.times = record.times_of(path)
        self.times.note(0)  # of what came before, no times are known

    def hang_up(self) -> None:
        """Closes the pipe; what was written is still forwarded."""
        if not self.hung_up:
            os.close(self.source)
            self.hung_up = True

    def close(self) -> None:
        """Closes the log, after all of it has been forwarded."""
        self.hang_up()
        if self._lost:
            self._note_loss()
        if self._file >= 0:
            os.close(self._file)
        if self.times is not None:
            self.times.close()
        if self._announce is None:
            self._mux.end(self._stream)
        else:  # nothing was written
            self._mux.finish(self._stream)
