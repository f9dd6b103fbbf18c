"""A forwarded connection on the host: connects to a port, and passes bytes between it and the client.

Imported by the first Connect.
"""

from __future__ import annotations

import os
import socket

from skyfab.errors import ProtocolError
from skyfab.host.agent.poller import READ, WRITE
from skyfab.protocol.messages import Done, Failed, Shut
from skyfab.protocol.relay import Relay
from skyfab.protocol.send_queue import FORWARD_QUEUE, FORWARD_WINDOW

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from typing import Any

    from skyfab.host.agent.poller import Poller
    from skyfab.protocol.messages import Connect
    from skyfab.protocol.mux import Mux

    Place = tuple[int, Any]
    """The family and the address of a socket."""


class Forwarded:
    """One connection, from Connect until both directions have ended. It removes itself from `channels`."""

    def __init__(self, stream: int, message: Connect, mux: Mux, poller: Poller, channels: dict[int, Forwarded]) -> None:
        """Raises ProtocolError for what is no port, and for a stream that has a connection."""
        if not 0 < message.port < 65536:
            raise ProtocolError(f"not a port: {message.port}")
        if stream in channels:
            raise ProtocolError(f"stream {stream} has a connection already")
        self._stream = stream
        self._mux = mux
        self._poller = poller
        self._channels = channels
        self._places: list[Place] = []
        """The addresses that are still to be tried."""
        self._reason = ""
        """Why the first of them failed."""
        self._socket: socket.socket | None = None
        self._events = 0
        self._is_connected = False
        self._relay = Relay(self)
        self.paused = False
        channels[stream] = self
        mux.limit(stream, FORWARD_WINDOW, self._taken)
        self._resolve(message.host, message.port)

    # ---- connecting

    def _resolve(self, host: str, port: int) -> None:
        """Finds the addresses. Asking for a name can take seconds, so a thread does that."""
        if not host:
            self._places = [(socket.AF_INET, ("127.0.0.1", port)), (socket.AF_INET6, ("::1", port))]
            self._try_next()
            return
        from threading import Thread

        done, ended = os.pipe()

        def ask() -> None:
            try:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                self._places = [(family, place) for family, _, _, _, place in found]
            except (OSError, UnicodeError) as error:
                self._reason = f"{host}: {getattr(error, 'strerror', None) or error}"
            finally:
                os.close(ended)

        def answered() -> None:
            self._poller.drop(done)
            os.close(done)
            if self._channels.get(self._stream) is self:  # else the client has given up meanwhile
                self._try_next()

        self._poller.add(done, READ, answered)
        Thread(target=ask, daemon=True).start()

    def _try_next(self) -> None:
        """Begins to connect to the next address; without any left, reports why the first one failed."""
        while self._places:
            family, place = self._places.pop(0)
            try:
                self._socket = socket.socket(family, socket.SOCK_STREAM)
                self._socket.setblocking(False)
                self._socket.connect(place)
            except BlockingIOError:
                pass
            except OSError as error:
                self._give_up(error)
                continue
            self._watch(WRITE)
            return
        self._remove()
        self._mux.forget(self._stream)
        self._mux.send(self._stream, Failed(text=self._reason).encode())

    def _give_up(self, error: OSError) -> None:
        """This address cannot be connected to."""
        self._leave()
        self._reason = self._reason or (error.strerror or str(error)).lower()

    def _look(self, connecting: socket.socket) -> None:
        """The attempt to connect has ended, or another socket had this number before."""
        code = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._give_up(OSError(code, os.strerror(code)))
            self._try_next()
            return
        try:
            connecting.getpeername()
        except OSError:  # not yet
            return
        self._is_connected = True
        self._mux.send(self._stream, Done().encode())
        self._relay.begin(connecting)
        self._go_on()

    # ---- the socket

    def _ready(self) -> None:
        assert self._socket is not None
        if self._is_connected:
            self._relay.ready()
            self._go_on()
        else:
            self._look(self._socket)

    def _go_on(self) -> None:
        """Watches the socket for what can happen next, or ends."""
        if self._relay.is_over:
            self._remove()
            (self._mux.forget if self._relay.is_refused else self._mux.finish)(self._stream)
        elif self._is_connected:
            self._watch((READ if self._relay.wants_read else 0) | (WRITE if self._relay.wants_write else 0))

    def _watch(self, events: int) -> None:
        if events != self._events and self._socket is not None:
            self._poller.drop(self._socket.fileno())
            self._events = events
            if events:
                self._poller.add(self._socket.fileno(), events, self._ready)

    def _remove(self) -> None:
        self._channels.pop(self._stream, None)
        self._leave()

    def _leave(self) -> None:
        if self._socket is not None:
            self._watch(0)
            self._socket.close()
            self._socket = None

    # ---- from the client

    def data(self, view: memoryview) -> None:
        self._relay.data(view)
        self._go_on()

    def end(self, message: Shut) -> None:
        """The client sends no more. Raises ProtocolError."""
        self._relay.shut(message)
        if message.broken and not self._is_connected:
            self.close()
        else:
            self._go_on()

    def close(self) -> None:
        """Closes the socket, whatever is under way."""
        self._relay.break_off()
        self._remove()
        self._mux.forget(self._stream)

    # ---- to the client

    def send(self, data: bytes) -> None:
        self._mux.send_data(self._stream, data)
        self.paused = self._mux.queued(self._stream) >= FORWARD_QUEUE

    def _taken(self, left: int) -> None:
        if self.paused and left < FORWARD_QUEUE // 2:
            self.paused = False
            self._go_on()

    def used(self, count: int) -> None:
        self._mux.used(self._stream, count)

    def shut(self, total: int, broken: bool) -> None:
        self._mux.send(self._stream, Shut(total=total, broken=broken).encode())
