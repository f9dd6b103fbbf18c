"""A seat's agent and a seat's process, for tests of what is between them: a clock, and pipes without anybody there."""

from __future__ import annotations

import os
import signal
from typing import Any

from skyfab.host.agent.poller import Poller
from skyfab.host.agent.worker_handle import WorkerHandle
from skyfab.protocol import messages
from skyfab.protocol.frames import HEAD, frame


class Agent:
    """What a worker's handle knows of its agent: it records what the handle sends."""

    def __init__(self) -> None:
        self.mux: Any = self
        self.poller = Poller()
        self.dirty: set[WorkerHandle] = set()
        self.stuck: set[WorkerHandle] = set()
        self.behind: set[Any] = set()
        self.timed: set[WorkerHandle] = set()
        self.time = 0.0
        self.signals: list[int] = []
        self.said: list[tuple[int, messages.Message]] = []
        self.finished: list[int] = []
        self.abandoned: list[int] = []

    def now(self) -> float:
        return self.time

    def flush(self) -> None: ...
    def relay(self, frame: bytes) -> bool:
        return False

    def kill(self, worker: WorkerHandle, number: int = signal.SIGKILL) -> None:
        self.signals.append(number)

    def abandon(self, stream: int) -> None:
        self.abandoned.append(stream)

    def drain(self, log: Any) -> None: ...

    # ---- the mux

    def send(self, stream: int, head: bytes, parts: Any = (), *, large: bool = False) -> None:
        self.said.append((stream, messages.decode(head)))

    def send_data(self, stream: int, data: Any) -> None: ...
    def queued(self, stream: int) -> int:
        return 0

    def used(self, stream: int, length: int) -> None: ...
    def forget(self, stream: int) -> None: ...
    def finish(self, stream: int) -> None:
        self.finished.append(stream)

    # ---- what the test asks

    def look(self) -> None:
        """As the agent does every round."""
        for worker in list(self.timed):
            worker.check_time(self.time)

    def answers(self) -> dict[int, str]:
        """How each call was answered: result, or why it ended."""
        return {stream: getattr(message, "why", message.op) for stream, message in self.said if stream}


class Process:
    """The rank's end of a seat's pipes."""

    def __init__(self, worker: WorkerHandle) -> None:
        self._source, self._sink = worker.rank_ends
        os.set_blocking(self._source, False)

    def heard(self) -> bytes:
        try:
            return os.read(self._source, 65536)
        except BlockingIOError:
            return b""

    def answer(self, stream: int) -> None:
        head = messages.Result.head(parts=(2,))
        os.write(self._sink, frame(HEAD, stream, head + b"ok", len(head)))

    def say(self, data: bytes) -> None:
        os.write(self._sink, data)

    def close(self) -> None:
        for fd in (self._source, self._sink):
            os.close(fd)
