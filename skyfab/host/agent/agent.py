"""The agent: the process on a host that serves one pool, as a single-threaded event loop.

It survives the loss of connections for the time of its lease. When no client reconnects in that time, it terminates
its workers and exits.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time

from skyfab.errors import ProtocolError
from skyfab.host.agent.cleanup import Presence, remove_dead
from skyfab.host.agent.connection import Connection
from skyfab.host.agent.handlers import Handlers
from skyfab.host.agent.host_info import HostInfo
from skyfab.host.agent.lease import Lease
from skyfab.host.agent.logs import note
from skyfab.host.agent.poller import READ, WRITE, Poller
from skyfab.host.agent.uploads import Uploads
from skyfab.host.agent.workers import Workers
from skyfab.protocol import VERSION, messages
from skyfab.protocol.messages import ClientHello
from skyfab.protocol.mux import Mux

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from typing import Final

    from skyfab.host.agent.zygote import Zygote

_SETTLE: Final = 0.25
"""Seconds in which the second direction of a broken connection closes after the first."""


class Agent:
    """The pool's process on this host."""

    def __init__(self, listener: socket.socket, zygote: Zygote, *, cache: str, session: str) -> None:
        self._listener = listener
        self._run = os.getcwd()
        self._presence = Presence(self._run)
        self._host_info = HostInfo()
        self._connection: Connection | None = None
        self._waiting: set[Connection] = set()
        """Further connections, on which no hello has been received yet."""
        self._ended: Connection | None = None
        """The connection that has ended, kept until `_judge_at`, when `_judge` checks if a direction is still open."""
        self._judge_at = 0.0
        self._local = False
        """The client runs on this host, without a network in between."""
        self._lease = Lease()
        self._pace = 1.0
        """Seconds between time checks of an idle loop."""
        self._rounds = 0
        self._ending = self._done = False
        """`_ending`: running calls have a short time left; `_done`: also that is over."""
        self._greeted = False
        """A client has sent hello, so it may reconnect."""
        self.mux = Mux(self)
        self._poller = Poller()
        self._uploads = Uploads(self.mux)
        logs = os.path.join(cache, "logs", session)
        self._workers = Workers(self, self._poller, zygote, self._uploads, self._host_info, logs=logs)
        self._handlers = Handlers(self.mux, self._workers, self._uploads, self._poller, run=self._run, cache=cache)
        self.opened = self._handlers.take
        self.place = self._uploads.place
        self.data = self._uploads.data

    # ---- the loop

    def run(self) -> None:
        """Runs until the client sends BYE, the lease expires, a detached run is complete, or SIGTERM."""
        wakeup, signals = os.pipe()  # a signal alone would not interrupt the poll
        os.set_blocking(signals, False)
        signal.set_wakeup_fd(signals)
        signal.signal(signal.SIGTERM, self._terminated)
        self._poller.add(wakeup, READ, lambda: os.read(wakeup, 64))
        self._listener.setblocking(False)
        self._poller.add(self._listener.fileno(), READ, self._accept)
        try:
            while not self._done:
                idle = not self._poller.wait(self._wait_time())
                self._workers.pass_on()
                if self.mux.has_output:
                    self.flush()
                self._rounds += 1
                if idle or self._connection is None or not self._rounds & 63:  # rarely when busy, to save time
                    self._look_at_the_clock()
                if self._ending:
                    self._done |= self._workers.shut_down()
        finally:
            self._clean_up()

    def _terminated(self, *_: object) -> None:
        self._ending = True

    def _wait_time(self) -> float:
        """Seconds until the next timer."""
        if self._workers.busy:
            return 0.0
        if self._connection and not self._workers.timed:
            return self._pace
        until = min(self._presence.due, self._until() if self._ended is None else self._judge_at)
        return max(0.0, (self._workers.next_deadline(until) if self._workers.timed else until) - time.monotonic())

    def _look_at_the_clock(self) -> None:
        self._presence.renew()
        if self._ended is not None and time.monotonic() >= self._judge_at:
            self._judge()
        if self._ended is None and (time.monotonic() >= self._until() or self._is_fulfilled()):
            self._ending = True

    def _until(self) -> float:
        """When the lease expires, unless something is received from the client before."""
        record = self._handlers.record
        if record is not None and record.running:
            return time.monotonic() + 3600
        return self._lease.until(self.mux.last_received if self._connection else None)

    def _is_fulfilled(self) -> bool:
        """Whether all calls of a detached run have been answered, and no client is connected that could make more."""
        record = self._handlers.record
        return self._connection is None and record is not None and not record.running

    def _clean_up(self) -> None:
        """Terminates the workers and removes the socket and the run folder. The process ends then."""
        import shutil

        self._handlers.look_at_files()
        self._workers.close()
        self._uploads.close()
        self._handlers.close()
        self._listener.close()
        os.chdir("/")
        shutil.rmtree(self._run, ignore_errors=True)
        self.mux.bye("done")
        self.flush()
        self._drop()

    # ---- the connection

    def _accept(self) -> None:
        try:
            link, _ = self._listener.accept()
        except OSError:
            return  # the link has already disconnected
        link.setblocking(False)
        self._poller.add(link.fileno(), READ, lambda: self._arrived(link))

    def _arrived(self, link: socket.socket) -> None:
        """A link passes its stdin and stdout, or has disconnected."""
        self._poller.drop(link.fileno())
        fds: list[int] = []
        try:
            data, fds, _, _ = socket.recv_fds(link, 65536, 2)
            source, sink = fds
            self._host_info.reached_through(str(json.loads(data)["connection"]))
            connection = Connection(link, source, sink)
            if self._connection is None:
                self._join(connection)
            else:  # keep the current one, which may still work: a client that connects several times sends one hello
                self._poller.add(connection.source, READ, lambda: self._consider(connection))
                self._waiting.add(connection)
        except (OSError, ValueError, TypeError, KeyError) as error:
            note(f"not a link: {error!r}")
            for fd in fds:
                os.close(fd)
            link.close()

    def _consider(self, connection: Connection) -> None:
        """A further connection has data, the client's hello, and replaces the current one; or it was closed."""
        self._poller.drop(connection.source)
        self._waiting.discard(connection)
        if connection.has_data():
            self._drop()
            self._join(connection)
        else:
            connection.close()

    def _join(self, connection: Connection) -> None:
        self._poller.add(connection.source, READ, self._read)
        if self._ended is not None:  # the client still runs, so why that one ended no longer matters
            self._close_ended()
        self._connection = connection
        self.mux.attach(self._host_info.hello(self.mux.received).encode())
        self.flush()

    def _read(self) -> None:
        assert self._connection is not None
        try:
            alive = self.mux.read(self._connection.recv_into)
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            note(f"connection ended: {error}")
            self._drop()
            return
        if not alive:
            self._drop(looking=True)

    def flush(self) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            drained = self.mux.flush(connection.lend)
        except OSError:
            self._drop(looking=True)
            return
        if not drained:
            self._poller.add(connection.sink, WRITE, self.flush)
        elif connection.sink in self._poller:
            self._poller.drop(connection.sink)

    def relay(self, frame: bytes) -> bool:
        connection = self._connection
        try:
            if connection is None or self._handlers.record is not None:
                return False
            return self.mux.relay(frame, connection.send)
        except OSError:
            self._drop(looking=True)
            return True  # the mux keeps it for the next connection

    def _drop(self, *, looking: bool = False) -> None:
        """The connection is lost; the client may reconnect. With `looking`, `_judge` decides how long to wait."""
        connection = self._connection
        if connection is None:
            return
        self._poller.drop(connection.source)
        self._poller.drop(connection.sink)
        self._connection = None
        self._lease.disconnected()
        if not self._greeted:  # the client disconnected before its first hello
            self._done = True
        if not looking or not connection.greeted or self._done:
            connection.close()
            return
        self._ended, self._judge_at = connection, time.monotonic() + _SETTLE
        if not connection.is_there():
            self._judge()

    def _judge(self) -> None:
        """Decides whether the program or only the connection has ended. A client that opens further ones still runs."""
        assert self._ended is not None
        if (self._local or self._ended.is_there()) and not self._waiting:
            self._lease.is_program_ended = True
        what = "the program has ended" if self._lease.is_program_ended else "the connection has ended"
        note(f"{what}: its client has {self._lease.seconds:g} s to reconnect")
        self._close_ended()

    def _close_ended(self) -> None:
        assert self._ended is not None
        self._ended.close()
        self._ended = None

    # ---- callbacks of the mux

    def hello(self, payload: bytes) -> None:
        hello = messages.expect(ClientHello, payload)
        if hello.protocol != VERSION:
            raise ProtocolError(f"the client has protocol version {hello.protocol}, this agent {VERSION}")
        if not hello.lease >= 0:
            raise ProtocolError(f"a lease of {hello.lease} s")
        if not self._greeted:
            remove_dead(self._run)
        self._greeted = True
        self._local = hello.local
        if self._connection is not None:
            self._connection.greeted = True
        self._lease.agree(hello.lease)
        self._pace = min(2.0, hello.lease / 4)
        self.mux.resume(hello.received)

    def bye(self, reason: str) -> None:
        self._ending = True
