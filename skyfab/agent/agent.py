"""The agent: one loop on one host for one pool.

It outlives connections, on a lease: while no client is connected it waits so long and then ends its ranks
and itself. It knows mechanisms only (spawn a process in a seat, pass a call on, keep a blob); which call
goes where is the client's business.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time

from skyfab.agent.connection import Connection
from skyfab.agent.machine import Machine
from skyfab.agent.ports import Ports, reach
from skyfab.agent.record import Record
from skyfab.agent.seat import Running, Seat
from skyfab.agent.seats import Seats
from skyfab.agent.store import Store, Writer
from skyfab.agent.sweep import sweep
from skyfab.agent.watch import READ, WRITE, Watch
from skyfab.errors import ProtocolError
from skyfab.protocol import VERSION, messages
from skyfab.protocol.blobs import Assembly, inline_size
from skyfab.protocol.frames import CHUNK, HEADER
from skyfab.protocol.messages import AgentHello, ClientHello, Done, Failed
from skyfab.protocol.streams import Mux

TYPE_CHECKING = False  # a cold host has no time for `typing`
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Final

    from skyfab.agent.zygote import Zygote

    Data = memoryview | None
    """What a small message has with it; a large one's data follows."""
    Route = Seat | Writer | Assembly | None
    """Where the data of a large message goes; None drops it."""

_FIRST_LEASE: Final = 30.0
"""Seconds to wait for the first hello, which says how long later silences may be."""
_FULL: Final = (28, 122)  # ENOSPC, EDQUOT


class Agent:
    """The pool's process on this host."""

    def __init__(self, listener: socket.socket, zygote: Zygote, *, cache: str, session: str) -> None:
        self._listener = listener
        self._run = os.getcwd()
        self._cache = cache
        self._record: Record | None = None
        """Of a run that goes on without a client."""
        self._machine = Machine()
        self._store = Store(run=self._run, cache=cache)
        self._connection: Connection | None = None
        self._waiting: set[Connection] = set()
        """Others, on which nobody has said hello yet."""
        self._routes: dict[int, Route] = {}
        self._missing: dict[int, int] = {}
        self._ports = Ports()
        self._functions: dict[str, tuple[bytes, bytes | Assembly]] = {}
        self._lease = _FIRST_LEASE
        self._pace = 1.0
        """Seconds after which an idle loop looks at the clock."""
        self._rounds = 0
        self._silent_since = time.monotonic()
        self._done = False
        self._greeted = False
        """A client has said hello: it may come back."""
        self._mux = Mux(self, express=self._express)
        self._watch = Watch()
        self._seats = Seats(
            self._mux,
            self._watch,
            zygote,
            logs=os.path.join(cache, "logs", session),
            describe_end=self._machine.describe_end,
            flush=self._write,
            relay=self._relay,
            abandon=self._abandon,
        )

    # ---- the loop

    def run(self) -> None:
        """Until the client says goodbye or its lease runs out."""
        alarm, bell = os.pipe()  # a signal alone would not wake us from waiting
        os.set_blocking(bell, False)
        signal.set_wakeup_fd(bell)
        signal.signal(signal.SIGTERM, self._terminated)
        self._watch.add(alarm, READ, lambda: self._woken(alarm))
        self._listener.setblocking(False)
        self._watch.add(self._listener.fileno(), READ, self._accept)
        try:
            while not self._done:
                idle = not self._watch.wait(self._patience())
                self._seats.pass_on()
                if self._mux.has_output:
                    self._write()
                self._rounds += 1
                if idle or self._connection is None or not self._rounds & 63:  # a busy loop has no time to look
                    self._look_at_the_clock()
        finally:
            self._clean_up()

    def _express(self, stream: int, frame: memoryview, head: int) -> bool:
        """Passes a small call on as it lies, to a seat that is idle and has had one like it."""
        seat = self._seats.familiar.get(bytes(frame[HEADER.size : HEADER.size + head]))
        return seat is not None and seat.take(stream, frame)

    def _woken(self, alarm: int) -> None:
        os.read(alarm, 64)

    def _terminated(self, *_: object) -> None:
        self._done = True

    def _patience(self) -> float:
        """Seconds until something must be done without being asked."""
        if self._seats.busy:
            return 0.0
        if self._connection and not self._seats.timed:
            return self._pace
        until = self._until()
        return max(0.0, (self._seats.next_deadline(until) if self._seats.timed else until) - time.monotonic())

    def _look_at_the_clock(self) -> None:
        if time.monotonic() >= self._until() or self._is_fulfilled():
            self._done = True

    def _until(self) -> float:
        """When the lease runs out, unless the client is heard before."""
        if self._record is not None and self._record.running:
            return time.monotonic() + 3600
        return (self._mux.heard if self._connection else self._silent_since) + self._lease

    def _is_fulfilled(self) -> bool:
        """A run's calls are answered, and nobody is there who could make more."""
        return self._connection is None and self._record is not None and not self._record.running

    def _clean_up(self) -> None:
        """Nothing is left: ranks, socket, folder."""
        import shutil

        self._seats.close()
        for route in self._routes.values():
            if isinstance(route, Writer):  # half a blob is nobody's
                route.abort()
        if self._record is not None:
            self._record.close()
        self._ports.close_all()
        self._listener.close()
        os.chdir("/")
        shutil.rmtree(self._run, ignore_errors=True)
        self._mux.bye("done")
        self._write()
        self._drop()
        for connection in self._waiting:
            connection.close()

    # ---- the connection

    def _accept(self) -> None:
        link, _ = self._listener.accept()
        link.settimeout(5)
        try:
            data, fds, _, _ = socket.recv_fds(link, 65536, 2)
            about = json.loads(data)
        except (OSError, ValueError):
            link.close()
            return
        self._machine.reached_through(about.get("connection", ""))
        connection = Connection(link, *fds)
        if self._connection is None:
            self._join(connection)
        else:  # the one that is there may be dead, and may be alive: a client that tries several times says hello once
            self._waiting.add(connection)
            self._watch.add(connection.source, READ, lambda: self._consider(connection))

    def _consider(self, connection: Connection) -> None:
        """A client on another connection says hello, or has given it up."""
        self._watch.drop(connection.source)
        self._waiting.discard(connection)
        if connection.has_data():
            self._drop()
            self._join(connection)
        else:
            connection.close()

    def _join(self, connection: Connection) -> None:
        self._connection = connection
        self._watch.add(connection.source, READ, self._read)
        self._mux.attach(self._hello())
        self._write()

    def _hello(self) -> bytes:
        return AgentHello(
            protocol=VERSION,
            received=self._mux.received,
            python=f"{sys.version_info[0]}.{sys.version_info[1]}",
            cloudpickle=self._machine.cloudpickle,
            hostname=self._machine.name,
            address=self._machine.address,
            gpus=self._machine.gpus,
            cpus=self._machine.cpus,
            platform=self._machine.platform,
            pid=os.getpid(),
            executable=sys.executable,
        ).encode()

    def _read(self) -> None:
        assert self._connection is not None
        try:
            alive = self._mux.read(self._connection.recv_into)
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            print(f"connection ended: {error}", file=sys.stderr)
            alive = False
        if not alive:
            self._drop()

    def _write(self) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            drained = self._mux.flush(connection.send)
        except OSError:
            self._drop()
            return
        if not drained:
            self._watch.add(connection.sink, WRITE, self._write)
        elif connection.sink in self._watch:
            self._watch.drop(connection.sink)

    def _relay(self, frame: memoryview) -> bool:
        connection = self._connection
        try:
            if connection is None or self._record is not None:
                return False
            return self._mux.relay(bytes(frame), connection.send)
        except OSError:
            self._drop()
            return True  # it is kept, for the next connection

    def _drop(self) -> None:
        """The connection is gone; the client may come back."""
        if self._connection is None:
            return
        self._watch.drop(self._connection.source)
        self._watch.drop(self._connection.sink)
        self._connection.close()
        self._connection = None
        self._silent_since = time.monotonic()
        if not self._greeted:  # it gave up before it had begun
            self._done = True

    # ---- what the mux tells

    def hello(self, payload: bytes) -> None:
        hello = messages.expect(ClientHello, payload)
        if hello.protocol != VERSION:
            raise ProtocolError(f"protocol {hello.protocol} there, {VERSION} here")
        if not hello.lease >= 0:
            raise ProtocolError(f"a lease of {hello.lease} s")
        if not self._greeted:
            sweep(self._run)
        self._greeted = True
        self._lease = hello.lease
        self._pace = min(2.0, hello.lease / 4)
        self._mux.resume(hello.received)

    def bye(self, reason: str) -> None:
        self._done = True

    def opened(self, stream: int, head: bytes, data: Data) -> None:
        message = messages.decode(head)
        try:
            _OPERATIONS[type(message)](self, stream, message, head, data)
        except Exception as error:
            self._fail(stream, error)

    def place(self, stream: int, length: int) -> memoryview:
        route = self._routes.get(stream)
        return route.place(length) if isinstance(route, Assembly) else memoryview(bytearray(length))

    def data(self, stream: int, view: memoryview) -> None:
        route = self._routes.get(stream)
        if isinstance(route, Seat):
            route.give_data(stream, view)
        else:
            self._mux.used(stream, len(view))
            if isinstance(route, Assembly):
                route.advance(len(view))
            elif isinstance(route, Writer):
                self._keep(stream, route, view)
        left = self._missing.get(stream, 0) - len(view)
        self._missing[stream] = left
        if left <= 0:
            self._complete(stream)

    def _expect(self, stream: int, parts: Sequence[messages.Part], route: Route) -> None:
        """The data of a large message will follow."""
        self._routes[stream] = route
        self._missing[stream] = inline_size(parts)
        if not self._missing[stream]:
            self._complete(stream)

    def _complete(self, stream: int) -> None:
        """All data of a large message is here."""
        self._missing.pop(stream, None)
        route = self._routes.pop(stream, None)
        if isinstance(route, Writer):
            self._commit(stream, route)

    def _abandon(self, stream: int) -> None:
        """Data still under way on this stream goes nowhere."""
        if stream in self._routes:
            route, self._routes[stream] = self._routes[stream], None
            if isinstance(route, Writer):
                route.abort()

    def _fail(self, stream: int, error: Exception) -> None:
        self._abandon(stream)
        full = isinstance(error, OSError) and error.errno in _FULL
        hint = "free some space there, or put the cache on another disk (cache = … in the inventory)" if full else None
        self._mux.send(stream, Failed(text=str(error), hint=hint).encode())

    # ---- operations: processes and calls

    def _spawn(self, stream: int, message: messages.Spawn, head: bytes, data: Data) -> None:
        request = {
            "env": message.env,
            "info": message.info,
            "path": self._store.roots(message.tree) if message.tree else [],
            "stores": self._store.folders,
        }
        self._seats.spawn(message.seat, message.generation, request, self._ports.hand_over(message.port))

    def _call(self, stream: int, message: messages.Call, head: bytes, data: Data) -> None:
        seat = self._seats.get(message.seat)
        if seat is None:
            self._mux.send(stream, messages.Ended(why="unstarted").encode())
        else:
            if message.function not in seat.functions:
                self._teach(seat, message.function)
            if self._record is not None:
                self._record.expect(stream, seat.rank)
                self._record.keep_call(message)
            seat.give(Running(stream, message.timeout), head, data)
            if data is not None and message.timeout is None:
                self._seats.recognise(head, seat)
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

    def _function(self, stream: int, message: messages.Function, head: bytes, data: Data) -> None:
        if data is not None:
            self._functions[message.digest] = (head, bytes(data))
        else:
            content = Assembly(message.parts)
            self._functions[message.digest] = (head, content)
            self._expect(stream, message.parts, content)

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
        if self._record is not None:
            raise ProtocolError("this agent has a run already")
        self._record = Record(os.path.join(self._cache, "runs", message.run), message.about, self._mux)
        self._seats.keep_in(self._record)
        self._mux.send(stream, Done().encode())

    def _look(self, stream: int, message: messages.Look, head: bytes, data: Data) -> None:
        self._mux.send(stream, Done(text=self._seats.look(message.seat)).encode())

    # ---- operations: content

    def _has(self, stream: int, message: messages.Has, head: bytes, data: Data) -> None:
        self._mux.send(stream, messages.Missing(names=self._store.missing(message.names)).encode())

    def _blob(self, stream: int, message: messages.Blob, head: bytes, data: Data) -> None:
        inline_size(message.parts)
        writer = self._store.writer(message.name, keep=message.keep)
        if data is None:
            self._expect(stream, message.parts, writer)
        elif self._keep(stream, writer, data):
            self._commit(stream, writer)

    def _keep(self, stream: int, writer: Writer, view: memoryview) -> bool:
        try:
            writer.write(view)
        except OSError as error:
            writer.abort()
            self._fail(stream, error)
            return False
        return True

    def _commit(self, stream: int, writer: Writer) -> None:
        try:
            writer.commit()
        except (OSError, ProtocolError) as error:
            writer.abort()
            self._fail(stream, error)
        else:
            self._mux.send(stream, Done().encode())

    def _tree(self, stream: int, message: messages.Tree, head: bytes, data: Data) -> None:
        self._store.lay_out(message.digest, message.files)
        self._mux.send(stream, Done().encode())

    def _port(self, stream: int, message: messages.Port, head: bytes, data: Data) -> None:
        self._mux.send(stream, Done(text=str(self._ports.open(self._machine.address))).encode())

    def _unport(self, stream: int, message: messages.Unport, head: bytes, data: Data) -> None:
        self._ports.close(message.port)

    def _reach(self, stream: int, message: messages.Reach, head: bytes, data: Data) -> None:
        failed, interface = reach(message.peers)
        self._mux.send(stream, messages.Reached(failed=failed, interface=interface).encode())


_OPERATIONS: Final[dict[type[messages.Message], Any]] = {
    messages.Spawn: Agent._spawn,
    messages.Call: Agent._call,
    messages.Function: Agent._function,
    messages.Forget: Agent._forget,
    messages.Cancel: Agent._cancel,
    messages.Recall: Agent._recall,
    messages.Release: Agent._release,
    messages.Look: Agent._look,
    messages.Detach: Agent._detach,
    messages.Has: Agent._has,
    messages.Blob: Agent._blob,
    messages.Tree: Agent._tree,
    messages.Port: Agent._port,
    messages.Unport: Agent._unport,
    messages.Reach: Agent._reach,
}
