"""The worker processes of a host: starts and ends them, and tracks which have data to relay."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from skyfab.context import STACKS
from skyfab.errors import ProtocolError
from skyfab.host.agent.logs import LogPipe, note
from skyfab.host.agent.poller import READ
from skyfab.host.agent.worker_handle import WorkerHandle
from skyfab.host.agent.zygote import Zygote
from skyfab.protocol import messages

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Final

    from skyfab.host.agent.host_info import HostInfo
    from skyfab.host.agent.poller import Poller
    from skyfab.host.agent.run_folder import RunFolder
    from skyfab.host.agent.uploads import Uploads
    from skyfab.protocol.mux import Mux

_STACKS: Final = 64 * 1024
_GRACE: Final = 2.0
_CLOSE_TIMEOUT: Final = 1.0
"""Seconds that idle processes have to exit when the pool closes."""
_STOP_TIMEOUT: Final = 2.5
"""The same, if some run a call: these are killed a little earlier."""


class Workers:
    """All worker processes of a pool on this host."""

    def __init__(
        self,
        agent: Any,
        poller: Poller,
        zygote: Zygote,
        uploads: Uploads,
        host_info: HostInfo,
        *,
        logs: str,
    ) -> None:
        """`agent` sends to the client: the `Agent` of host/agent/agent.py."""
        self.mux: Mux | RunFolder = agent.mux
        self._record: RunFolder | None = None
        self.flush = agent.flush
        self.relay = agent.relay
        self.abandon = uploads.abandon
        self.dirty: set[WorkerHandle] = set()
        """Those with queued frames to flush."""
        self.stuck: set[WorkerHandle] = set()
        """Those whose replies wait for the connection."""
        self.timed: set[WorkerHandle] = set()
        """Those with a deadline."""
        self.busy = False
        """The last round of the event loop could not relay everything."""
        self.behind: set[LogPipe] = set()
        """Logs that have not been forwarded completely."""
        self.poller = poller
        self._zygote = zygote
        self._logs = logs
        self._describe_end = host_info.describe_end
        self._workers: dict[str, WorkerHandle] = {}
        self.get = self._workers.get
        self.not_started: dict[str, tuple[int, str]] = {}
        """Workers whose process could not be started: their rank, and the error."""
        self._end_by: float | None = None
        """When the pool closes, or a detached run is stopped: until when processes may react."""
        self._started = 0
        self._next_stream = 2
        poller.add(zygote.fileno(), READ, self._on_zygote)

    def __iter__(self) -> Iterator[WorkerHandle]:
        return iter(list(self._workers.values()))

    def spawn(
        self, name: str, generation: int, request: dict[str, Any], listener: int = -1, *, pipelined: bool = False
    ) -> None:
        """Starts a worker process, and replaces one of the same name. It inherits the descriptor `listener`, if any."""
        if not name.replace(".", "").replace("-", "").isalnum():  # it becomes part of file names
            raise ProtocolError(f"not the name of a worker: {name!r:.80}")
        self._end(name)
        self.not_started.pop(name, None)
        os.makedirs(self._logs, mode=0o700, exist_ok=True)
        with contextlib.suppress(OSError):
            os.unlink(f"stacks/{name}")  # it marks that the process handles the signal, which the new one does not yet
        rank = int(request["info"].get("rank", 0))
        self._started += 1
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:  # the process's descriptors, and ours
            logs = [self._log(name, rank, fd, theirs, ours) for fd in (1, 2)]
            worker = WorkerHandle(self, self._started, name, generation, logs, rank)
            worker.pipelined = pipelined
            ours.callback(worker.close)
            for fd in worker.rank_ends:
                theirs.callback(os.close, fd)
            fds = [*worker.rank_ends, *(log.sink for log in logs), *([listener] if listener >= 0 else [])]
            self._zygote.spawn({"id": worker.number, "worker": name, **request}, fds)
            ours.pop_all()
        self._workers[name] = worker
        for log in logs:
            self._on_output(log)
        self.poller.add(worker.source, READ, worker.output.read)

    def fail(self, name: str, generation: int, rank: int, error: Exception) -> None:
        """A process could not be started. Calls to it may already be in flight; their replies will give the error."""
        self._end(name)  # calls must not reach the process that it should have replaced
        self.not_started[name] = (rank, _not_started(error))
        self.mux.send(0, messages.Exited(worker=name, generation=generation).encode())

    def _end(self, name: str) -> None:
        """Kills a worker, if there is one of that name."""
        if (old := self._workers.get(name)) is not None:
            old.kill()
            self._reap(old, -signal.SIGKILL)

    def _log(
        self, worker: str, rank: int, fd: int, theirs: contextlib.ExitStack, ours: contextlib.ExitStack
    ) -> LogPipe:
        stream = self._next_stream
        self._next_stream += 2
        name = worker if self._record is None else str(rank)
        path = os.path.join(self._logs, f"{name}.{'out' if fd == 1 else 'err'}")
        log = LogPipe(self.mux, stream, path, worker=worker, fd=fd)
        if self._record is not None:
            log.times = self._record.times_of(path)
        theirs.callback(os.close, log.sink)
        ours.callback(log.close)
        return log

    def keep_in(self, record: RunFolder) -> None:
        """From now on, logs and replies go to the folder of a detached run, those of running calls included."""
        self.mux = self._record = record
        self._logs = record.logs
        record.on_failure = self._end_soon
        for worker in self:
            if worker.name.startswith("solo."):  # it runs an unrelated call, whose reply will not be read
                worker.kill()
                continue
            for call in worker.calls:
                record.expect(call.stream, worker.rank)
            for log, end in zip(worker.logs, ("out", "err"), strict=True):
                log.move(os.path.join(self._logs, f"{worker.rank}.{end}"), record)

    def _end_soon(self) -> None:
        """A rank of the run has failed: ends the others on this host soon, as they may wait for it forever."""
        for worker in self:
            worker.end_soon(_GRACE)

    # ---- requests of handlers and of worker handles

    def release(self, name: str) -> None:
        """Terminates a worker."""
        worker = self._workers.get(name)
        if worker is not None and not worker.shut_down():
            worker.kill()

    def dump_stacks(self, name: str) -> str:
        """Returns the stack traces that a worker wrote after the last request, and requests new ones (context.py)."""
        worker = self._workers.get(name)
        if worker is None:
            return ""
        try:
            with open(f"stacks/{name}", "rb+") as file:
                about = file.readline()
                text = file.read(_STACKS)
                file.truncate(len(about))
        except OSError:
            return ""
        if about:  # else the signal handler is not installed yet
            self._zygote.kill(worker.number, STACKS, alone=True)
        return text.decode(errors="replace")

    now = staticmethod(time.monotonic)

    def kill(self, worker: WorkerHandle, number: int = signal.SIGKILL) -> None:
        self._zygote.kill(worker.number, number)

    def interrupt(self, worker: WorkerHandle) -> None:
        """Makes a process read what it was sent, also while a function runs."""
        self._zygote.kill(worker.number, signal.SIGINT, alone=True)

    def drain(self, log: LogPipe) -> None:
        """Reads what a process has written to its stdout or stderr."""
        if not log.drain() or log.stopped:
            self.poller.drop(log.source)
        if log.waiting:
            self.behind.add(log)

    def _on_output(self, log: LogPipe) -> None:
        self.poller.add(log.source, READ, lambda: self.drain(log))

    # ---- every round of the event loop

    def pass_on(self) -> None:
        """Relays what was received in this round, and what had to wait for the connection."""
        while self.dirty:
            self.dirty.pop().flush()
        self.busy = False
        if not self.behind and not self.stuck:
            return
        for log in list(self.behind):
            stopped = log.stopped
            self.busy |= log.catch_up()
            if stopped and not log.stopped and not log.hung_up:
                self._on_output(log)
            if not log.waiting:
                self.behind.discard(log)
                if log.hung_up:
                    log.close()
        for worker in list(self.stuck):
            self.busy |= worker.output.resume()

    def next_deadline(self, until: float) -> float:
        """Ends calls that have timed out; returns when to check again, `until` at the latest."""
        for worker in list(self.timed):
            until = min(until, worker.check_time(self.now()) or until)
        return until if self._end_by is None else min(until, self._end_by)

    # ---- the end of workers

    def _on_zygote(self) -> None:
        try:
            notices = self._zygote.notices()
        except EOFError:
            note("the zygote died: starting another")
            self.poller.drop(self._zygote.fileno())
            for worker in self:  # Linux has killed the workers, but not the processes that they started
                if worker.group:
                    with contextlib.suppress(OSError):
                        os.killpg(worker.group, signal.SIGKILL)
                self._reap(worker, -signal.SIGKILL)
            self._zygote.close()
            self._zygote = Zygote()
            self.poller.add(self._zygote.fileno(), READ, self._on_zygote)
            return
        for what, number, value in notices:
            for worker in self:
                if worker.number != number:
                    continue
                if what == "started":
                    worker.group = value
                elif what == "failed":
                    self.not_started[worker.name] = (worker.rank, _not_started(value))  # for calls still in flight
                    self._reap(worker, None, _not_started(value))
                else:
                    self._reap(worker, value)

    def _reap(self, worker: WorkerHandle, exitcode: int | None, text: str = "") -> None:
        """The worker process has exited, or could not be started."""
        if self._end_by is None:
            worker.ended(exitcode, text if exitcode is None else self._describe_end(exitcode))
        else:
            worker.output.finish()  # no replies: the client learns that the agent has ended
        if self._workers.get(worker.name) is worker:
            del self._workers[worker.name]
        self._retire(worker)

    def _retire(self, worker: WorkerHandle) -> None:
        self.poller.drop(worker.source)
        self.poller.drop(worker.sink)
        for log in worker.logs:
            log.drain()
            self.poller.drop(log.source)
            log.hang_up()
            self.behind.add(log)  # what it has written is still forwarded
        for group in (self.dirty, self.stuck, self.timed):
            group.discard(worker)
        worker.close()

    def shut_down(self) -> bool:
        """Ends every process, and returns whether all have exited, or their time is over.

        Idle ones exit by themselves. Those that run a call get SIGTERM and time to react. What they write meanwhile is
        forwarded, so this is called in every round of the event loop.
        """
        if self._end_by is None:
            busy = [worker for worker in self if not worker.shut_down()]
            self._end_by = self.now() + (_STOP_TIMEOUT if busy else _CLOSE_TIMEOUT)
            if self._record is not None:
                self._record.stop()
        for worker in self:
            if worker.calls:
                worker.stop("cancelled")
        return not self._workers or self.now() >= self._end_by

    def close(self) -> None:
        """Kills the processes that are left."""
        self._zygote.close()


def _not_started(why: object) -> str:
    return f"its process could not be started: {why}"
