"""The agent: one loop on one host for one pool.

It outlives connections, on a lease: while no client is connected it waits so long and then ends its ranks
and itself. It knows mechanisms only (spawn a process in a seat, pass a call on, keep a blob); which call
goes where is the client's business.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time

from skyfab.agent.connection import Connection
from skyfab.agent.logs import LogPipe
from skyfab.agent.machine import Machine
from skyfab.agent.seat import Running, Seat
from skyfab.agent.store import Store, Writer
from skyfab.agent.zygote import Zygote
from skyfab.errors import ProtocolError
from skyfab.protocol import VERSION, messages
from skyfab.protocol.blobs import Assembly, inline_size
from skyfab.protocol.frames import CHUNK
from skyfab.protocol.messages import AgentHello, ClientHello, Done, Failed
from skyfab.protocol.streams import Mux

TYPE_CHECKING = False  # a cold host has no time for `typing`
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, Final

    Route = Seat | Writer | Assembly | None

_FIRST_LEASE: Final = 30.0
"""Seconds to wait for the first hello, which says how long later silences may be."""
_READ: Final = selectors.EVENT_READ
_WRITE: Final = selectors.EVENT_WRITE


class Agent:
    """The pool's process on this host."""

    def __init__(self, listener: socket.socket, zygote: Zygote, *, cache: str, session: str) -> None:
        self._listener = listener
        self._cache = cache
        self._run = os.getcwd()
        self._logs = os.path.join(cache, "logs", session)
        self._machine = Machine()
        self._zygote = zygote
        self._selector = selectors.DefaultSelector()
        self._store = Store(run=self._run, cache=cache)
        self._connection: Connection | None = None
        self._seats: dict[str, Seat] = {}
        self._routes: dict[int, Route] = {}
        """Where the data of a message goes; None drops it."""
        self._missing: dict[int, int] = {}
        self._functions: dict[str, tuple[bytes, bytes | Assembly]] = {}
        self._next_stream = 2
        self._ranks = 0
        self._lease = _FIRST_LEASE
        self._silent_since = time.monotonic()
        self._done = False
        self._busy = False
        """There is more to pass on than one round could."""
        self._behind: set[LogPipe] = set()
        self.dirty: set[Seat] = set()
        self.stuck: set[Seat] = set()
        self.mux = Mux(self)

    # ---- the loop

    def run(self) -> None:
        """Until the client says goodbye or its lease runs out."""
        signal.signal(signal.SIGTERM, self._terminated)
        self._listener.setblocking(False)
        self._selector.register(self._listener, _READ, self._accept)
        self._selector.register(self._zygote, _READ, self._heed_zygote)
        try:
            while not self._done:
                for key, events in self._selector.select(self._patience()):
                    key.data(events)
                self._look_after()
        finally:
            self._clean_up()

    def _terminated(self, *_: object) -> None:
        self._done = True

    def now(self) -> float:
        return time.monotonic()

    def _patience(self) -> float:
        """Seconds until something must be done without being asked."""
        if self._busy:
            return 0.0
        now = self.now()
        until = now + 60.0
        for seat in self._seats.values():
            if seat.calls and seat.calls[0].deadline is not None:
                until = min(until, seat.check_time(now) or until)
        if self._connection is None:
            until = min(until, self._silent_since + self._lease)
        return max(0.0, until - now)

    def _look_after(self) -> None:
        """Passes on what this round of events has brought, and what had to wait for room."""
        while self.dirty:
            self.dirty.pop().flush()
        self._busy = False
        if self._behind or self.stuck:
            for log in list(self._behind):
                stopped = log.stopped
                self._busy |= log.catch_up()
                if stopped and not log.stopped:
                    self._selector.register(log, _READ, lambda _, log=log: self.drain(log))
                if not log.waiting:
                    self._behind.discard(log)
            for seat in list(self.stuck):
                self._busy |= seat.resume()
        if self.mux.has_output:
            self._write()
        if self._connection is None and self.now() >= self._silent_since + self._lease:
            self._done = True

    # ---- the connection

    def _accept(self, events: int) -> None:
        link, _ = self._listener.accept()
        link.settimeout(5)
        try:
            data, fds, _, _ = socket.recv_fds(link, 65536, 2)
            about = json.loads(data)
        except (OSError, ValueError):
            link.close()
            return
        self._drop()
        self._machine.reached_through(about.get("connection", ""))
        self._connection = Connection(link, *fds)
        self._selector.register(self._connection.source, _READ, self._read)
        self.mux.attach(self._hello())
        self._write()

    def _hello(self) -> bytes:
        return AgentHello(
            protocol=VERSION,
            received=self.mux.received,
            python=f"{sys.version_info[0]}.{sys.version_info[1]}",
            cloudpickle=self._machine.cloudpickle,
            hostname=self._machine.name,
            address=self._machine.address,
            gpus=self._machine.gpus,
            cpus=self._machine.cpus,
            platform=self._machine.platform,
            pid=os.getpid(),
        ).encode()

    def _read(self, events: int) -> None:
        assert self._connection is not None
        try:
            alive = self.mux.read(self._connection.recv_into)
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            print(f"connection ended: {error}", file=sys.stderr)
            alive = False
        if not alive:
            self._drop()

    def flush(self) -> None:
        self._write()

    def _write(self, events: int = 0) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            drained = self.mux.flush(connection.send)
        except OSError:
            self._drop()
            return
        if drained == connection.waiting:
            connection.waiting = not drained
            if drained:
                self._selector.unregister(connection.sink)
            else:
                self._selector.register(connection.sink, _WRITE, self._write)

    def _drop(self) -> None:
        """The connection is gone; the client may come back."""
        if self._connection is None:
            return
        self._selector.unregister(self._connection.source)
        if self._connection.waiting:
            self._selector.unregister(self._connection.sink)
        self._connection.close()
        self._connection = None
        self._silent_since = self.now()

    # ---- what the mux tells

    def hello(self, payload: bytes) -> None:
        hello = messages.expect(ClientHello, payload)
        if hello.protocol != VERSION:
            raise ProtocolError(f"protocol {hello.protocol} here, {VERSION} there")
        self._lease = hello.lease
        self.mux.resume(hello.received)

    def bye(self, reason: str) -> None:
        self._done = True

    def opened(self, stream: int, head: bytes, data: memoryview | None) -> None:
        message = messages.decode(head)
        try:
            _OPERATIONS[type(message)](self, stream, message, head, data)
        except Exception as error:
            self._fail(stream, error)

    def place(self, stream: int, length: int) -> memoryview:
        route = self._routes.get(stream)
        if isinstance(route, Assembly):
            return route.place(length)
        return memoryview(bytearray(length))

    def data(self, stream: int, view: memoryview) -> None:
        route = self._routes.get(stream)
        if isinstance(route, Seat):
            route.give_data(stream, view)
        else:
            self.mux.used(stream, len(view))
            if isinstance(route, Assembly):
                route.advance(len(view))
            elif isinstance(route, Writer):
                self._store_data(stream, route, view)
        left = self._missing.get(stream, 0) - len(view)
        self._missing[stream] = left
        if left <= 0:
            self._complete(stream)

    def _complete(self, stream: int) -> None:
        """All data of a message is here."""
        self._missing.pop(stream, None)
        route = self._routes.pop(stream, None)
        if isinstance(route, Writer):
            try:
                route.commit()
            except (OSError, ProtocolError) as error:
                self._fail(stream, error)
            else:
                self.mux.send(stream, Done().encode())

    def _expect(self, stream: int, parts: Sequence[messages.Part], route: Route) -> None:
        """The data of a large message will follow."""
        self._routes[stream] = route
        self._missing[stream] = inline_size(parts)
        if not self._missing[stream]:
            self._complete(stream)

    def _fail(self, stream: int, error: Exception) -> None:
        self._routes.pop(stream, None)
        full = isinstance(error, OSError) and error.errno in (28, 122)
        hint = "free some space there, or put the cache on another disk (cache = … in the inventory)" if full else None
        self.mux.send(stream, Failed(text=str(error), hint=hint).encode())

    def _store_data(self, stream: int, writer: Writer, view: memoryview) -> None:
        try:
            writer.write(view)
        except OSError as error:
            writer.abort()
            self._fail(stream, error)

    # ---- operations

    def _spawn(self, stream: int, message: messages.Spawn, head: bytes, data: memoryview | None) -> None:
        old = self._seats.pop(message.seat, None)
        if old is not None:
            old.kill()
            self._retire(old)
        os.makedirs(self._logs, mode=0o700, exist_ok=True)
        logs = [self._log(message.seat, fd) for fd in (1, 2)]
        self._ranks += 1
        seat = self._seats[message.seat] = Seat(self, self._ranks, message.seat, logs)
        request = {
            "id": seat.number,
            "seat": message.seat,
            "env": message.env,
            "info": message.info,
            "path": self._path(message.tree),
            "stores": self._store.folders,
        }
        theirs = [*seat.rank_ends, *(log.sink for log in logs)]
        self._zygote.spawn(request, theirs)
        for fd in theirs:
            os.close(fd)
        for log in logs:
            self._selector.register(log, _READ, lambda _, log=log: self.drain(log))
        self.readable(seat, True)

    def _log(self, seat: str, fd: int) -> LogPipe:
        stream = self._next_stream
        self._next_stream += 2
        path = os.path.join(self._logs, f"{seat}.{'out' if fd == 1 else 'err'}")
        return LogPipe(self.mux, stream, path, seat=seat, fd=fd)

    def _path(self, tree: str) -> list[str]:
        """The roots of a tree, in order: its folders are numbered."""
        if not tree:
            return []
        folder = self._store.tree(tree)
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]

    def _call(self, stream: int, message: messages.Call, head: bytes, data: memoryview | None) -> None:
        seat = self._seats.get(message.seat)
        if seat is None or seat.condemned:
            self.mux.send(stream, messages.Ended(why="unstarted").encode())
            seat = None
        else:
            if message.function not in seat.functions:
                self._teach(seat, message.function)
            seat.give(Running(stream, message.timeout), head, data)
        if data is None:
            self._expect(stream, message.parts, seat)

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

    def _function(self, stream: int, message: messages.Function, head: bytes, data: memoryview | None) -> None:
        if data is not None:
            self._functions[message.digest] = (head, bytes(data))
        else:
            content = Assembly(message.parts)
            self._functions[message.digest] = (head, content)
            self._expect(stream, message.parts, content)

    def _forget(self, stream: int, message: messages.Forget, head: bytes, data: memoryview | None) -> None:
        for digest in message.digests:
            self._functions.pop(digest, None)
        for seat in self._seats.values():
            seat.functions.difference_update(message.digests)
            seat.tell(0, head, b"")

    def _cancel(self, stream: int, message: messages.Cancel, head: bytes, data: memoryview | None) -> None:
        for seat in self._seats.values():
            seat.cancel(message.stream)

    def _recall(self, stream: int, message: messages.Recall, head: bytes, data: memoryview | None) -> None:
        for seat in self._seats.values():
            for call in message.streams:
                seat.take_back(call, "recalled")

    def _release(self, stream: int, message: messages.Release, head: bytes, data: memoryview | None) -> None:
        seat = self._seats.get(message.seat)
        if seat is not None:
            seat.kill()

    def _has(self, stream: int, message: messages.Has, head: bytes, data: memoryview | None) -> None:
        self.mux.send(stream, messages.Missing(names=self._store.missing(message.names)).encode())

    def _blob(self, stream: int, message: messages.Blob, head: bytes, data: memoryview | None) -> None:
        writer = self._store.writer(message.name, keep=message.keep)
        if data is None:
            self._expect(stream, message.parts, writer)
            return
        try:
            writer.write(data)
            writer.commit()
        except OSError:
            writer.abort()
            raise
        self.mux.send(stream, Done().encode())

    def _tree(self, stream: int, message: messages.Tree, head: bytes, data: memoryview | None) -> None:
        self._store.lay_out(message.digest, message.files)
        self.mux.send(stream, Done().encode())

    def _port(self, stream: int, message: messages.Port, head: bytes, data: memoryview | None) -> None:
        with socket.socket() as probe:
            probe.bind(("", 0))
            self.mux.send(stream, Done(text=str(probe.getsockname()[1])).encode())

    # ---- seats

    def writable(self, seat: Seat, wanted: bool) -> None:
        self._watch(seat, seat.sink, _WRITE if wanted else 0, lambda _: seat.flush())

    def readable(self, seat: Seat, wanted: bool) -> None:
        self._watch(seat, seat.source, _READ if wanted else 0, lambda _: self._read_seat(seat))

    def _read_seat(self, seat: Seat) -> None:
        if not seat.read():
            self.readable(seat, False)

    def _watch(self, seat: Seat, fd: int, events: int, callback: Callable[[int], None]) -> None:
        if events and fd not in seat.watched:
            self._selector.register(fd, events, callback)
            seat.watched.add(fd)
        elif not events and fd in seat.watched:
            self._selector.unregister(fd)
            seat.watched.discard(fd)

    def drain(self, log: LogPipe) -> None:
        """Takes what a process has written."""
        if not log.drain() or log.stopped:
            with contextlib.suppress(KeyError):
                self._selector.unregister(log)
        if log.waiting:
            self._behind.add(log)

    def _heed_zygote(self, events: int) -> None:
        try:
            notices = self._zygote.notices()
        except EOFError:
            print("the zygote died: starting another", file=sys.stderr)
            self._selector.unregister(self._zygote)
            for seat in list(self._seats.values()):
                self._bury(seat, -signal.SIGKILL)
            self._zygote = Zygote()
            self._selector.register(self._zygote, _READ, self._heed_zygote)
            return
        for number, exitcode in notices:
            for seat in list(self._seats.values()):
                if seat.number == number:
                    self._bury(seat, exitcode)

    def abandon(self, stream: int) -> None:
        """Data still under way on this stream goes nowhere."""
        if stream in self._routes:
            self._routes[stream] = None

    def kill(self, seat: Seat) -> None:
        self._zygote.kill(seat.number)

    def _bury(self, seat: Seat, exitcode: int) -> None:
        """The seat's process is gone."""
        seat.ended(exitcode, self._machine.describe_end)
        if self._seats.get(seat.name) is seat:
            del self._seats[seat.name]
        self._retire(seat)

    def _retire(self, seat: Seat) -> None:
        self.readable(seat, False)
        self.writable(seat, False)
        for log in seat.logs:
            log.drain()
            with contextlib.suppress(KeyError):
                self._selector.unregister(log)
            self._behind.discard(log)
        self.dirty.discard(seat)
        self.stuck.discard(seat)
        for stream, route in list(self._routes.items()):
            if route is seat:
                self.abandon(stream)
        seat.close()

    # ---- the end

    def _clean_up(self) -> None:
        """Nothing is left: ranks, socket, folder."""
        self._zygote.close()
        self._listener.close()
        import shutil

        os.chdir("/")
        shutil.rmtree(self._run, ignore_errors=True)
        self.mux.bye("done")
        self._write()
        self._drop()


_OPERATIONS: Final[dict[type[messages.Message], Any]] = {
    messages.Spawn: Agent._spawn,
    messages.Call: Agent._call,
    messages.Function: Agent._function,
    messages.Forget: Agent._forget,
    messages.Cancel: Agent._cancel,
    messages.Recall: Agent._recall,
    messages.Release: Agent._release,
    messages.Has: Agent._has,
    messages.Blob: Agent._blob,
    messages.Tree: Agent._tree,
    messages.Port: Agent._port,
}
