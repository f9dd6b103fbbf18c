"""The agent: one loop on one host for one pool.

It outlives connections, on a lease: while no client is connected it waits so long and then ends its ranks and itself.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time

from skyfab.agent.cleanup import sweep
from skyfab.agent.connection import Connection
from skyfab.agent.handlers import Orders
from skyfab.agent.host_info import Machine
from skyfab.agent.lease import Lease
from skyfab.agent.poller import READ, WRITE, Watch
from skyfab.agent.uploads import Routes
from skyfab.agent.workers import Seats
from skyfab.errors import ProtocolError
from skyfab.protocol import VERSION, messages
from skyfab.protocol.frames import HEADER
from skyfab.protocol.messages import AgentHello, ClientHello
from skyfab.protocol.mux import Mux

TYPE_CHECKING = False  # a cold host has no time for `typing`
if TYPE_CHECKING:
    from typing import Final

    from skyfab.agent.zygote import Zygote

_SETTLE: Final = 0.25
"""Seconds in which the second direction of a connection that breaks follows the first."""


class Agent:
    """The pool's process on this host."""

    def __init__(self, listener: socket.socket, zygote: Zygote, *, cache: str, session: str) -> None:
        self._listener = listener
        self._run = os.getcwd()
        self._machine = Machine()
        self._connection: Connection | None = None
        self._arriving: set[socket.socket] = set()
        """Links that have not handed over a connection yet."""
        self._waiting: set[Connection] = set()
        """Others, on which nobody has said hello yet."""
        self._ended: Connection | None = None
        """The connection that has ended, until `_judge_at`: then it shows whether one direction is still open."""
        self._judge_at = 0.0
        self._local = False
        """There is no network between the client and this host."""
        self._lease = Lease()
        self._pace = 1.0
        """Seconds after which an idle loop looks at the clock."""
        self._rounds = 0
        self._done = False
        self._greeted = False
        """A client has said hello: it may come back."""
        self._mux = Mux(self, express=self._express)
        self._watch = Watch()
        self._routes = Routes(self._mux)
        self._seats = Seats(
            self._mux,
            self._watch,
            zygote,
            logs=os.path.join(cache, "logs", session),
            describe_end=self._machine.describe_end,
            flush=self._write,
            relay=self._relay,
            abandon=self._routes.abandon,
        )
        self._orders = Orders(self._mux, self._seats, self._routes, self._watch, run=self._run, cache=cache)

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
        until = self._until() if self._ended is None else self._judge_at
        return max(0.0, (self._seats.next_deadline(until) if self._seats.timed else until) - time.monotonic())

    def _look_at_the_clock(self) -> None:
        if self._ended is not None:
            if time.monotonic() >= self._judge_at:
                self._judge()
        elif time.monotonic() >= self._until() or self._is_fulfilled():
            self._done = True

    def _until(self) -> float:
        """When the lease runs out, unless the client is heard before."""
        record = self._orders.record
        if record is not None and record.running:
            return time.monotonic() + 3600
        return self._lease.until(self._mux.heard if self._connection else None)

    def _is_fulfilled(self) -> bool:
        """A run's calls are answered, and nobody is there who could make more."""
        record = self._orders.record
        return self._connection is None and record is not None and not record.running

    def _clean_up(self) -> None:
        """Nothing is left: ranks, socket, folder."""
        import shutil

        self._orders.look_at_files()
        self._seats.close()
        self._routes.close()
        self._orders.close()
        self._listener.close()
        os.chdir("/")
        shutil.rmtree(self._run, ignore_errors=True)
        self._mux.bye("done")
        self._write()
        self._drop()
        if self._ended is not None:
            self._close_ended()
        for connection in self._waiting:
            connection.close()
        for link in self._arriving:
            link.close()

    # ---- the connection

    def _accept(self) -> None:
        try:
            link, _ = self._listener.accept()
        except OSError:
            return  # it is gone again
        link.setblocking(False)
        self._arriving.add(link)
        self._watch.add(link.fileno(), READ, lambda: self._arrived(link))

    def _arrived(self, link: socket.socket) -> None:
        """A link hands over its ends of a connection, or is gone."""
        self._watch.drop(link.fileno())
        self._arriving.discard(link)
        fds: list[int] = []
        try:
            data, fds, _, _ = socket.recv_fds(link, 65536, 2)
            source, sink = fds
            self._machine.reached_through(str(json.loads(data)["connection"]))
            connection = Connection(link, source, sink)
            if self._connection is None:
                self._join(connection)
            else:  # it may be dead, and may be alive: a client that tries several times says hello once
                self._watch.add(connection.source, READ, lambda: self._consider(connection))
                self._waiting.add(connection)
        except (OSError, ValueError, TypeError, KeyError) as error:
            print(f"a link that is none: {error!r}", file=sys.stderr)
            for fd in fds:
                os.close(fd)
            link.close()

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
        self._watch.add(connection.source, READ, self._read)
        if self._ended is not None:  # the client is there, however that one ended
            self._close_ended()
        self._connection = connection
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
            addresses=self._machine.addresses(),
            network=self._machine.network,
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
            self._drop()
            return
        if not alive:
            self._drop(looking=True)

    def _write(self) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            drained = self._mux.flush(connection.send)
        except OSError:
            self._drop(looking=True)
            return
        if not drained:
            self._watch.add(connection.sink, WRITE, self._write)
        elif connection.sink in self._watch:
            self._watch.drop(connection.sink)

    def _relay(self, frame: memoryview) -> bool:
        connection = self._connection
        try:
            if connection is None or self._orders.record is not None:
                return False
            return self._mux.relay(bytes(frame), connection.send)
        except OSError:
            self._drop(looking=True)
            return True  # it is kept, for the next connection

    def _drop(self, *, looking: bool = False) -> None:
        """The connection is gone; the client may come back. With `looking`, `_judge` decides how long to wait."""
        connection = self._connection
        if connection is None:
            return
        self._watch.drop(connection.source)
        self._watch.drop(connection.sink)
        self._connection = None
        self._lease.disconnected()
        if not self._greeted:  # it gave up before it had begun
            self._done = True
        if not looking or not connection.greeted or self._done:
            connection.close()
            return
        self._ended, self._judge_at = connection, time.monotonic() + _SETTLE
        if not connection.is_there():
            self._judge()

    def _judge(self) -> None:
        """Decides whether the program or only a connection has ended. A client that tries others still runs."""
        assert self._ended is not None
        if (self._local or self._ended.is_there()) and not self._waiting:
            self._lease.program_ended()
        what = "the program has ended" if self._lease.is_program_ended else "the connection has ended"
        print(f"{what}: its client has {self._lease.seconds:g} s to come back", file=sys.stderr)
        self._close_ended()

    def _close_ended(self) -> None:
        assert self._ended is not None
        self._ended.close()
        self._ended = None

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
        self._local = hello.local
        if self._connection is not None:
            self._connection.greeted = True
        self._lease.agree(hello.lease)
        self._pace = min(2.0, hello.lease / 4)
        self._mux.resume(hello.received)

    def bye(self, reason: str) -> None:
        self._done = True

    def opened(self, stream: int, head: bytes, data: memoryview | None) -> None:
        self._orders.take(stream, head, data)

    def place(self, stream: int, length: int) -> memoryview:
        return self._routes.place(stream, length)

    def data(self, stream: int, view: memoryview) -> None:
        self._routes.data(stream, view)
