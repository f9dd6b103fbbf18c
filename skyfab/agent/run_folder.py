"""The record of a detached run on one host: nobody is there to hear, so answers and states are written to files.

``runs/ID`` in the cache holds `about` (what it is), `call` (what it runs), `status` (how it stands), `agent` (who runs
it), a log for each rank and stream, and each rank's answer. Whatever has its final name is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import time

from skyfab.protocol import messages
from skyfab.protocol.blobs import inline_size

TYPE_CHECKING = False  # a cold host has no time for `typing`
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from skyfab.protocol.frames import Buffer
    from skyfab.protocol.mux import Mux


class RunFolder:
    """Takes the place of the connection for the seats of a run: what they send is kept."""

    def __init__(self, folder: str, about: Mapping[str, Any], mux: Mux) -> None:
        os.makedirs(os.path.join(folder, "logs"), mode=0o700)
        self.logs = os.path.join(folder, "logs")
        self._folder = folder
        self._mux = mux
        self._ranks: dict[int, int] = {}
        """Calls that have not been answered: their streams, and the ranks that run them."""
        self._drafts: dict[int, tuple[Any, str, int]] = {}
        """Answers that are being written: the file, the state they mean, and how much is missing."""
        self._status: dict[str, Any] = {"state": "running", "started": time.time(), "ended": None, "ranks": {}}
        self.files: list[dict[str, Any]] = []
        """What lies in working folders at the end."""
        self.failed = False
        self.on_failure: Callable[[], None] = lambda: None
        self._write("agent", f"{os.getpid()} {_boot()} {os.getcwd()}\n".encode())
        self._write("status", json.dumps(self._status).encode())
        self._write("about", json.dumps(dict(about)).encode())  # last: with it the run is there

    @property
    def running(self) -> bool:
        """Some call is still to be answered."""
        return bool(self._ranks)

    def expect(self, stream: int, rank: int) -> None:
        """A rank has been given the call of the run."""
        self._ranks[stream] = rank
        self._note(rank, "running")

    def keep_call(self, call: messages.Call) -> None:
        """What is run, once: the function by its digest, and the sizes of its arguments. What they are stays unsaid."""
        if not os.path.exists(os.path.join(self._folder, "call")):
            sizes = [part if isinstance(part, int) else part[1] for part in call.parts]
            said = {"function": call.function, "arguments": sizes, "timeout": call.timeout}
            self._write("call", json.dumps(said).encode())

    def close(self) -> None:
        """Nothing more comes: what has not been answered was stopped."""
        for stream in list(self._drafts):
            self.forget(stream)
        for rank in self._ranks.values():
            self._status["ranks"][str(rank)] = "stopped"
        states = set(self._status["ranks"].values())
        self._status["state"] = next((bad for bad in ("stopped", "failed") if bad in states), "done")
        self._status["ended"] = time.time()
        self._status["files"] = self.files
        self._write("status", json.dumps(self._status).encode())

    def _note(self, rank: int, state: str) -> None:
        self._status["ranks"][str(rank)] = state
        self._write("status", json.dumps(self._status).encode())

    def _write(self, name: str, content: bytes) -> None:
        """Whole or not at all; a full disk must not end the run."""
        path = os.path.join(self._folder, name)
        with contextlib.suppress(OSError):
            with open(f"{path}.new", "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.rename(f"{path}.new", path)

    # ---- what seats and logs say

    def send(
        self, stream: int, head: bytes, parts: Sequence[Buffer] = (), *, urgent: bool = False, large: bool = False
    ) -> None:
        """An answer, if it is one: a rank's output is in its log, and nobody wants to know that a seat is free."""
        if stream not in self._ranks:
            return
        message = messages.decode(head)
        state = "done" if isinstance(message, messages.Result) else "failed"
        file = None
        with contextlib.suppress(OSError):
            file = open(self._path(stream) + ".new", "wb")  # noqa: SIM115
            file.write(len(head).to_bytes(4, "big") + head)
        self._drafts[stream] = (file, state, inline_size(getattr(message, "parts", ())))
        for part in parts:
            self.send_data(stream, part)
        if not self._drafts.get(stream, (None, "", 1))[2]:
            self._complete(stream)

    def send_data(self, stream: int, data: Buffer) -> None:
        if stream not in self._drafts:
            return
        file, state, missing = self._drafts[stream]
        missing -= len(data)
        try:
            if file is not None:
                file.write(data)
        except OSError:
            file, state = None, "failed"  # no room for it
        self._drafts[stream] = (file, state, missing)
        if missing <= 0 and len(data):
            self._complete(stream)

    def _complete(self, stream: int) -> None:
        file, state, _ = self._drafts.pop(stream)
        try:
            if file is None:
                raise OSError("there was no room")
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.rename(self._path(stream) + ".new", self._path(stream))
        except OSError:
            state = "failed"
        self._note(self._ranks.pop(stream), state)
        if state == "failed" and not self.failed:
            self.failed = True
            self.on_failure()

    def _path(self, stream: int) -> str:
        return os.path.join(self._folder, f"result.{self._ranks[stream]}")

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
        """A log is complete."""


def _boot() -> str:
    """Names the time since the machine was started."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return "?"
