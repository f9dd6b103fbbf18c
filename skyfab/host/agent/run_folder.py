"""The folder of a detached run on one host, to which the agent writes results and states.

``runs/ID`` in the cache contains `about` (the run's description), `status` (its state), `agent` (the agent's process),
a log for each rank and stream, when it was written, and each rank's result. A file with its final name is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import time

from skyfab.errors import HostUnfit
from skyfab.host.agent.host_info import boot_id
from skyfab.protocol import messages
from skyfab.protocol.blobs import inline_size

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, Final

    from skyfab.protocol.frames import Buffer
    from skyfab.protocol.mux import Mux

_PACE: Final = 0.01
"""Seconds between the times that are noted of a log: a process that writes all the time does not make the file long."""


class RunFolder:
    """Replaces the Mux for the workers of a detached run: stores what they send."""

    def __init__(self, folder: str, about: Mapping[str, Any], mux: Mux) -> None:
        """Creates the folder. Raises OSError, and HostUnfit if another host of the run has the same cache folder."""
        try:
            os.makedirs(os.path.join(folder, "logs"), mode=0o700)
        except FileExistsError:
            hint = "give each host its own: cache = … in the inventory"
            raise HostUnfit("it shares its cache folder with another host of this run", hint=hint) from None
        os.mkdir(os.path.join(folder, "times"), mode=0o700)
        self.logs = os.path.join(folder, "logs")
        self.folder = folder
        self._mux = mux
        self._expected: Sequence[int] = about.get("ranks", ())
        self._ranks: dict[int, int] = {}
        """Calls without a reply: their streams, and the ranks that run them."""
        self._drafts: dict[int, tuple[Any, str, int]] = {}
        """Replies that are being written: the file, the resulting state, and how many bytes are missing."""
        self._status: dict[str, Any] = {
            "state": "running",
            "started": time.time(),
            "ended": None,
            "ranks": {},
            "failed": {},
        }
        self.files: list[dict[str, Any]] = []
        """Which files were written in working folders, noted at the end."""
        self.failed = self._stopped = False
        self.on_failure: Callable[[], None] = lambda: None
        try:
            self._store("agent", f"{os.getpid()} {boot_id()} {os.getcwd()}\n".encode())
            self._store("status", json.dumps(self._status).encode())
            self._store("about", json.dumps(dict(about)).encode())  # last: its presence makes the run valid
        except OSError:  # the disk is full: the run does not begin
            import shutil

            shutil.rmtree(folder, ignore_errors=True)
            raise

    def times_of(self, log: str) -> LogTimes:
        """Notes when a log is written."""
        return LogTimes(os.path.join(self.folder, "times", os.path.basename(log)))

    @property
    def running(self) -> bool:
        """Whether some call has no reply yet."""
        return bool(self._ranks)

    def expect(self, stream: int, rank: int) -> None:
        """A rank has received the call of the run."""
        self._ranks[stream] = rank
        self._note(rank, "running")

    def stop(self) -> None:
        """The run is ended from outside: replies from now on do not count."""
        self._stopped = True

    def close(self) -> None:
        """Writes the final status; ranks without a reply count as stopped. A run without any call leaves nothing."""
        for stream in list(self._drafts):
            self.forget(stream)
        ranks = self._status["ranks"]
        if not ranks:
            import shutil

            shutil.rmtree(self.folder, ignore_errors=True)
            return
        ranks.update((str(rank), "stopped") for rank in self._ranks.values())
        ranks.update((str(rank), "stopped") for rank in self._expected if str(rank) not in ranks)
        states = set(ranks.values())
        self._status["state"] = next((bad for bad in ("stopped", "failed") if bad in states), "done")
        self._status["ended"] = time.time()
        self._status["files"] = self.files
        self._write("status", json.dumps(self._status).encode())

    def _note(self, rank: int, state: str) -> None:
        self._status["ranks"][str(rank)] = "failed" if state == "cancelled" else state
        if state == "failed":
            self._status["failed"][str(rank)] = time.time()
        self._write("status", json.dumps(self._status).encode())

    def _write(self, name: str, content: bytes) -> None:
        """Writes a file atomically. Ignores errors, because a full disk must not end the run."""
        with contextlib.suppress(OSError):
            self._store(name, content)

    def _store(self, name: str, content: bytes) -> None:
        path = os.path.join(self.folder, name)
        with open(f"{path}.new", "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(f"{path}.new", path)

    # ---- the interface of Mux, used by workers and logs

    def send(self, stream: int, head: bytes, parts: Sequence[Buffer] = (), *, large: bool = False) -> None:
        """Begins to store a reply. Ignores other messages: output is in the logs, and Exited has no reader."""
        if stream not in self._ranks or self._stopped:
            return
        message = messages.decode(head)
        state = "done" if isinstance(message, messages.Result) else "failed"
        if isinstance(message, messages.Ended) and message.why == "cancelled":
            state = "cancelled"  # because another rank has failed
        file = None
        with contextlib.suppress(OSError):
            file = open(self._path(stream) + ".new", "wb")  # noqa: SIM115
        first = len(head).to_bytes(4, "big") + head
        self._drafts[stream] = (file, state, len(first) + inline_size(getattr(message, "parts", ())))
        for part in (first, *parts):
            self.send_data(stream, part)

    def send_data(self, stream: int, data: Buffer) -> None:
        if stream not in self._drafts:
            return
        file, state, missing = self._drafts[stream]
        missing -= len(data)
        try:
            if file is not None:
                file.write(data)
        except OSError:  # the disk is full
            with contextlib.suppress(OSError):
                file.close()
            file, state = None, "failed"
        self._drafts[stream] = (file, state, missing)
        if missing <= 0 and len(data):
            self._complete(stream)

    def _complete(self, stream: int) -> None:
        file, state, _ = self._drafts.pop(stream)
        try:
            if file is None:
                raise OSError("no space left")
            with file:
                file.flush()
                os.fsync(file.fileno())
            os.rename(self._path(stream) + ".new", self._path(stream))
        except OSError:
            state = "failed"
        self._note(self._ranks.pop(stream), state)
        if state == "failed" and not self.failed:
            self.failed = True
            self.on_failure()

    def _path(self, stream: int) -> str:
        return os.path.join(self.folder, f"result.{self._ranks[stream]}")

    def queued(self, stream: int) -> int:
        return 0

    def used(self, stream: int, length: int) -> None:
        self._mux.used(stream, length)

    def forget(self, stream: int) -> None:
        file, _, _ = self._drafts.pop(stream, (None, "", 0))
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
                os.unlink(self._path(stream) + ".new")

    def finish(self, stream: int) -> None:
        """Nothing to do when a stream is complete."""

    end = finish


class LogTimes:
    """Notes when each part of a log was written, in a file beside it: logs of several hosts can be merged by time.

    A record of 32 bytes is an offset in the log and a time in milliseconds: what follows that offset was written then.
    Errors are ignored: without the times, the log is still there.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._last = -1.0
        self._file = self._open()

    def _open(self) -> int:
        with contextlib.suppress(OSError):
            return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return -1

    def note(self, offset: int) -> None:
        """What is written from this offset of the log on, is written now."""
        now = time.time()
        if not 0 <= now - self._last < _PACE:
            self._last = now
            with contextlib.suppress(OSError):
                os.write(self._file, b"%015d %015d\n" % (offset, round(now * 1000)))

    def turn_over(self) -> None:
        """The log was rotated."""
        with contextlib.suppress(OSError):
            os.rename(self._path, f"{self._path}.1")
        self.close()
        self._file = self._open()
        self._last = -1.0

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
