"""Orders: what the client asks for, carried out. Mechanisms only; which call goes where is the client's business."""

from __future__ import annotations

import json
import os

from skyfab.agent.files import Written, place
from skyfab.agent.ports import Ports
from skyfab.agent.reach import Reaching
from skyfab.agent.run_folder import Record
from skyfab.agent.store import Store
from skyfab.agent.worker_handle import Running, Seat
from skyfab.errors import ProtocolError
from skyfab.protocol import messages
from skyfab.protocol.blobs import Assembly, inline_size
from skyfab.protocol.frames import CHUNK
from skyfab.protocol.messages import Done

TYPE_CHECKING = False  # a cold host has no time for `typing`
if TYPE_CHECKING:
    from typing import Any, Final

    from skyfab.agent.poller import Watch
    from skyfab.agent.uploads import Routes
    from skyfab.agent.workers import Seats
    from skyfab.protocol.mux import Mux

    Data = memoryview | None
    """What a small message has with it; a large one's data follows."""


class Orders:
    """Takes a client's messages one by one."""

    def __init__(self, mux: Mux, seats: Seats, routes: Routes, watch: Watch, *, run: str, cache: str) -> None:
        self._mux = mux
        self._seats = seats
        self._routes = routes
        self._cache = cache
        self._watch = watch
        self._store = Store(run=run, cache=cache)
        self._ports = Ports(watch)
        self._written = Written()
        self._functions: dict[str, tuple[bytes, bytes | Assembly]] = {}
        self.record: Record | None = None
        """Of a run that goes on without a client."""

    def take(self, stream: int, head: bytes, data: Data) -> None:
        message = messages.decode(head)
        try:
            _OPERATIONS[type(message)](self, stream, message, head, data)
        except Exception as error:
            self._routes.fail(stream, error)

    def look_at_files(self) -> None:
        """A run's record says what was written. This takes a while, and comes before the run folder goes."""
        if self.record is not None:
            self.record.files = self._written.report()

    def close(self) -> None:
        """Nothing is left open."""
        if self.record is not None:
            self.record.close()
        self._ports.close_all()

    # ---- processes and calls

    def _spawn(self, stream: int, message: messages.Spawn, head: bytes, data: Data) -> None:
        listener = self._ports.hand_over(message.port)
        try:
            folder = place(message.workdir, self._cache)
            included = self._store.included(message.tree) if message.include else ""
            if folder:
                self._written.begin(message.workdir, folder, included)
            request = {
                "env": message.env,
                "info": message.info,
                "path": self._store.roots(message.tree) if message.tree else [],
                "stores": self._store.folders,
                "workdir": [folder, self._cache, included],
            }
            self._seats.spawn(message.seat, message.generation, request, listener)
        except Exception as error:
            rank = message.info.get("rank")
            self._seats.fail(message.seat, message.generation, rank if isinstance(rank, int) else 0, error)
        finally:
            if listener >= 0:
                os.close(listener)

    def _call(self, stream: int, message: messages.Call, head: bytes, data: Data) -> None:
        seat = self._seats.get(message.seat)
        if seat is None:
            self._refuse(stream, message.seat)
        else:
            if message.function not in seat.functions and not seat.condemned:
                self._teach(seat, message.function)
            if self.record is not None:
                self.record.expect(stream, seat.rank)
                self.record.keep_call(message)
            seat.give(Running(stream, message.timeout), head, data)
            if data is None:
                self._routes.expect(stream, message.parts, seat)
            elif message.timeout is None:
                self._seats.recognise(head, seat)

    def _refuse(self, stream: int, name: str) -> None:
        """Answers a call to a seat without a process: "died" if that could not be started, else "unstarted"."""
        if name not in self._seats.not_started:
            self._mux.send(stream, messages.Ended(why="unstarted").encode())
            return
        rank, why = self._seats.not_started[name]
        if self.record is not None:
            self.record.expect(stream, rank)
        self._seats.mux.send(stream, messages.Ended(why="died", text=why).encode())

    def _teach(self, seat: Seat, digest: str) -> None:
        """Passes a function on to a rank that has not seen it."""
        head, content = self._functions[digest]
        seat.functions.add(digest)
        if isinstance(content, bytes):
            seat.tell(0, head, content)
            return
        seat.tell(0, head, None)
        for part in content.inline:
            for at in range(0, len(part), CHUNK):
                seat.tell_data(0, part[at : at + CHUNK])

    def _function(self, stream: int, message: messages.Function, head: bytes, data: Data) -> None:
        if data is not None:
            self._functions[message.digest] = (head, bytes(data))
        else:
            content = Assembly(message.parts)
            self._functions[message.digest] = (head, content)
            self._routes.expect(stream, message.parts, content)

    def _forget(self, stream: int, message: messages.Forget, head: bytes, data: Data) -> None:
        for digest in message.digests:
            self._functions.pop(digest, None)
        self._seats.forget()
        for seat in self._seats:
            seat.functions.difference_update(message.digests)
            if not seat.calls:  # one that waits may be for such a function
                seat.tell(0, head, b"")

    def _cancel(self, stream: int, message: messages.Cancel, head: bytes, data: Data) -> None:
        for seat in self._seats:
            seat.cancel(message.stream)

    def _recall(self, stream: int, message: messages.Recall, head: bytes, data: Data) -> None:
        for seat in self._seats:
            for call in message.streams:
                seat.take_back(call, "recalled")

    def _release(self, stream: int, message: messages.Release, head: bytes, data: Data) -> None:
        self._seats.release(message.seat)

    def _detach(self, stream: int, message: messages.Detach, head: bytes, data: Data) -> None:
        if not message.run.isalnum():  # it names a folder
            raise ProtocolError(f"not the name of a run: {message.run!r:.80}")
        if self.record is not None:
            raise ProtocolError("this agent has a run already")
        self.record = Record(os.path.join(self._cache, "runs", message.run), message.about, self._mux)
        self._seats.keep_in(self.record)
        self._mux.send(stream, Done().encode())

    def _look(self, stream: int, message: messages.Look, head: bytes, data: Data) -> None:
        self._mux.send(stream, Done(text=self._seats.look(message.seat)).encode())

    def _report(self, stream: int, message: messages.Written, head: bytes, data: Data) -> None:
        self._mux.send(stream, Done(text=json.dumps(self._written.report())).encode())

    # ---- content, ports

    def _has(self, stream: int, message: messages.Has, head: bytes, data: Data) -> None:
        self._mux.send(stream, messages.Missing(names=self._store.missing(message.names)).encode())

    def _blob(self, stream: int, message: messages.Blob, head: bytes, data: Data) -> None:
        inline_size(message.parts)
        writer = self._store.writer(message.name, keep=message.keep)
        if data is None:
            self._routes.expect(stream, message.parts, writer)
        else:
            self._routes.keep(stream, writer, data)

    def _tree(self, stream: int, message: messages.Tree, head: bytes, data: Data) -> None:
        self._store.lay_out(message.digest, message.files)
        self._mux.send(stream, Done().encode())

    def _port(self, stream: int, message: messages.Port, head: bytes, data: Data) -> None:
        self._mux.send(stream, Done(text=str(self._ports.open(message.address, message.word))).encode())

    def _unport(self, stream: int, message: messages.Unport, head: bytes, data: Data) -> None:
        self._ports.close(message.port)

    def _reach(self, stream: int, message: messages.Reach, head: bytes, data: Data) -> None:
        def done(found: list[list[str]]) -> None:
            self._mux.send(stream, messages.Reached(found=found).encode())

        Reaching(message.peers, message.patience, self._watch, done)


_OPERATIONS: Final[dict[type[messages.Message], Any]] = {
    messages.Spawn: Orders._spawn,
    messages.Call: Orders._call,
    messages.Function: Orders._function,
    messages.Forget: Orders._forget,
    messages.Cancel: Orders._cancel,
    messages.Recall: Orders._recall,
    messages.Release: Orders._release,
    messages.Look: Orders._look,
    messages.Detach: Orders._detach,
    messages.Written: Orders._report,
    messages.Has: Orders._has,
    messages.Blob: Orders._blob,
    messages.Tree: Orders._tree,
    messages.Port: Orders._port,
    messages.Unport: Orders._unport,
    messages.Reach: Orders._reach,
}
