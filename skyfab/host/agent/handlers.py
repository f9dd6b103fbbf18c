"""Message handlers of the agent: `on_OP` for each client message. Scheduling is done by the client, not here."""

from __future__ import annotations

import json
import os

from skyfab.errors import ProtocolError
from skyfab.host.agent.ports import PeerProbe, Ports
from skyfab.host.agent.run_folder import RunFolder
from skyfab.host.agent.store import Store
from skyfab.host.agent.workdir import Written, place
from skyfab.host.agent.worker_handle import Running, WorkerHandle
from skyfab.protocol import messages
from skyfab.protocol.blobs import Assembly
from skyfab.protocol.frames import CHUNK
from skyfab.protocol.messages import Done

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from skyfab.host.agent.poller import Poller
    from skyfab.host.agent.uploads import Uploads
    from skyfab.host.agent.workers import Workers
    from skyfab.protocol.mux import Mux

    Data = memoryview | None
    """The data of a small message; None for a large one, whose data follows."""


class Handlers:
    """Executes the client's messages one by one."""

    def __init__(self, mux: Mux, workers: Workers, uploads: Uploads, watch: Poller, *, run: str, cache: str) -> None:
        self._mux = mux
        self._workers = workers
        self._uploads = uploads
        self._cache = cache
        self._poller = watch
        self._store = Store(run=run, cache=cache)
        self._ports = Ports(watch)
        self._written = Written()
        self._functions: dict[str, tuple[bytes, bytes | Assembly]] = {}
        self.record: RunFolder | None = None
        """The folder of the detached run, if there is one."""

    def take(self, stream: int, head: bytes, data: Data) -> None:
        try:
            message = messages.decode(head)
            handle = getattr(self, f"on_{message.op}", None)
            if handle is None:
                raise ProtocolError(f"a message {message.op!r} is sent by agents, not to them")
            handle(stream, message, head, data)
        except Exception as error:
            self._uploads.fail(stream, error)

    def look_at_files(self) -> None:
        """Notes in the folder of a detached run which files were written.

        This may take a while, and must be done before the agent's run folder is removed.
        """
        if self.record is not None:
            self.record.files = self._written.report()

    def close(self) -> None:
        """Closes the detached run's folder, and leaves the working folders to others."""
        self._written.close()
        if self.record is not None:
            self.record.close()

    # ---- processes and calls

    def on_spawn(self, stream: int, message: messages.Spawn, head: bytes, data: Data) -> None:
        listener = self._ports.hand_over(message.port)
        try:
            name, begun = self._written.claim(message.workdir, message.owner, self._cache)
            folder, origin = place(name, self._cache), place(begun, self._cache)
            included = self._store.included(message.tree) if message.include else ""
            if folder:
                self._written.begin(name, folder, included, reported=message.reported)
            request = {
                "env": message.env,
                "info": message.info,
                "path": self._store.roots(message.tree) if message.tree else [],
                "stores": self._store.folders,
                "workdir": [folder, self._cache, included, origin if folder != origin else ""],
                "plain": message.plain,
                "run": self.record.folder if self.record is not None else "",
                "threads": message.threads,
            }
            self._workers.spawn(message.worker, message.generation, request, listener, pipelined=message.pipelined)
        except Exception as error:
            rank = message.info.get("rank")
            self._workers.fail(message.worker, message.generation, rank if isinstance(rank, int) else 0, error)
        finally:
            if listener >= 0:
                os.close(listener)

    def on_call(self, stream: int, message: messages.Call, head: bytes, data: Data) -> None:
        worker = self._workers.get(message.worker)
        if worker is None:
            self._refuse(stream, message.worker)
        else:
            if message.function not in worker.functions and not worker.stopping:
                self._send_function(worker, message.function)
            if self.record is not None:
                self.record.expect(stream, worker.rank)
            worker.give(Running(stream, message.timeout, message.function), head, data)
            if data is None:
                self._uploads.expect(stream, message.parts, worker)

    def on_exchange(self, stream: int, message: messages.Exchange, head: bytes, data: Data) -> None:
        worker = self._workers.get(message.worker)
        if worker is None:
            self._mux.send(stream, messages.Yielded().encode())
            return
        worker.exchange(stream, message, head, data)
        if data is None and stream in worker.exchanges:
            self._uploads.expect(stream, message.parts, worker)

    def _refuse(self, stream: int, name: str) -> None:
        """Replies to a call for a worker that does not exist: "died" if it could not be started, else "unstarted"."""
        if name not in self._workers.not_started:
            self._mux.send(stream, messages.Ended(why="unstarted").encode())
            return
        rank, why = self._workers.not_started[name]
        if self.record is not None:
            self.record.expect(stream, rank)
        self._workers.mux.send(stream, messages.Ended(why="died", text=why).encode())

    def _send_function(self, worker: WorkerHandle, digest: str) -> None:
        """Sends a function to a worker that does not have it."""
        head, content = self._functions[digest]
        worker.functions.add(digest)
        if isinstance(content, bytes):
            worker.tell(0, head, content)
            return
        worker.tell(0, head, None)
        for part in content.inline:
            for at in range(0, len(part), CHUNK):
                worker.tell_data(0, part[at : at + CHUNK])

    def on_function(self, stream: int, message: messages.Function, head: bytes, data: Data) -> None:
        if data is not None:
            self._functions[message.digest] = (head, bytes(data))
        else:
            content = Assembly(message.parts)
            self._functions[message.digest] = (head, content)
            self._uploads.expect(stream, message.parts, content)

    def on_forget(self, stream: int, message: messages.Forget, head: bytes, data: Data) -> None:
        for digest in message.digests:
            self._functions.pop(digest, None)
        for worker in self._workers:
            worker.forget(self._functions)

    def on_cancel(self, stream: int, message: messages.Cancel, head: bytes, data: Data) -> None:
        for worker in self._workers:
            for call in message.streams:
                if message.begun:
                    worker.cancel(call)
                else:
                    worker.take_back(call, "unassigned")

    def on_stop_worker(self, stream: int, message: messages.StopWorker, head: bytes, data: Data) -> None:
        self._workers.release(message.worker)

    def on_detach(self, stream: int, message: messages.Detach, head: bytes, data: Data) -> None:
        if not message.run.isalnum():  # it becomes the name of a folder
            raise ProtocolError(f"not the name of a run: {message.run!r:.80}")
        if self.record is not None:
            raise ProtocolError("this agent already has a run")
        workdir, _ = self._written.claim(message.about.get("workdir", ""), message.owner, self._cache)
        about = {**message.about, "workdir": workdir}
        self.record = RunFolder(os.path.join(self._cache, "runs", message.run), about, self._mux)
        self._workers.keep_in(self.record)
        self._mux.send(stream, Done().encode())

    def on_dump_stacks(self, stream: int, message: messages.DumpStacks, head: bytes, data: Data) -> None:
        self._mux.send(stream, Done(text=self._workers.dump_stacks(message.worker)).encode())

    def on_written(self, stream: int, message: messages.Written, head: bytes, data: Data) -> None:
        self._mux.send(stream, Done(text=json.dumps(self._written.report())).encode())

    # ---- content, ports

    def on_has(self, stream: int, message: messages.Has, head: bytes, data: Data) -> None:
        self._mux.send(stream, messages.Missing(names=self._store.missing(message.names)).encode())

    def on_blob(self, stream: int, message: messages.Blob, head: bytes, data: Data) -> None:
        self._uploads.expect(stream, message.parts, self._store.writer(message.name, keep=message.keep))
        if data:
            self._uploads.data(stream, data)

    def on_tree(self, stream: int, message: messages.Tree, head: bytes, data: Data) -> None:
        self._store.lay_out(message.digest, message.files)
        self._mux.send(stream, Done().encode())

    def on_listen(self, stream: int, message: messages.Listen, head: bytes, data: Data) -> None:
        self._mux.send(stream, Done(text=str(self._ports.open(message.address, message.word))).encode())

    def on_unlisten(self, stream: int, message: messages.Unlisten, head: bytes, data: Data) -> None:
        self._ports.close(message.port)

    def on_probe_peers(self, stream: int, message: messages.ProbePeers, head: bytes, data: Data) -> None:
        def done(found: list[list[str]]) -> None:
            self._mux.send(stream, messages.PeersProbed(found=found).encode())

        PeerProbe(message.peers, message.timeout, self._poller, done)
