"""Port forwarding: `Compute.forward`. Connections to a port of this machine go over a pool's own to a host's port."""

from __future__ import annotations

import abc
import errno
import os
import re
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from skyfab.errors import ProtocolError, SkyfabError, UsageError
from skyfab.inventory.host import Host
from skyfab.pool.node import Node
from skyfab.pool.nodes import named
from skyfab.protocol import messages
from skyfab.protocol.relay import Relay
from skyfab.session.channel import Channel
from skyfab.ui.events import Events, Notice

_LOOPBACK: Final = "127.0.0.1"
_BACKLOG: Final = 128
_PAUSE: Final = 0.05
"""Seconds to wait when this program has too many open files for another connection."""


class Forward:
    """A port of this machine that leads to one of a host, until it is closed. A context manager that closes it."""

    def __init__(self, node: Node, place: tuple[str, int], local: int | None, events: Events) -> None:
        """Raises UsageError if the port here cannot be had."""
        self._node = node
        self._place = place
        self._events = events
        self._told = ""
        """What was last said about connections that fail; each thing is said once."""
        self._listener = _listen(place[1], local, taken=place[1] if _is_here(node.host) else 0)
        self.port: int = self._listener.getsockname()[1]
        """The port on this machine, at 127.0.0.1."""
        self._connections: set[_Connection] = set()
        self._woken: deque[_Connection] = deque()
        self._lock = threading.Lock()
        self._poked = self._closing = False
        self._waker, self._poker = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"skyfab-forward-{self.port}", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The port here as an address for a browser."""
        return f"http://{_LOOPBACK}:{self.port}"

    @property
    def to(self) -> str:
        """Where it leads: ``node1:6006``."""
        host, port = self._place
        return f"{self._node.name}:{host}:{port}" if host else f"{self._node.name}:{port}"

    @property
    def is_closed(self) -> bool:
        """Whether nothing listens there any more."""
        return self._closing

    def __repr__(self) -> str:
        return f"<Forward {self.url} → {self.to}{': closed' if self._closing else ''}>"

    def __enter__(self) -> Forward:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops listening, and breaks off connections that are open. Closing it again does nothing."""
        self._closing = True
        self.poke()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def leave_to_parent(self) -> None:
        """In a forked child: closes what it shares with the parent, which goes on."""
        self._closing = self._poked = True
        self._lock = threading.Lock()  # the parent's threads may have held it
        self._release()

    # ---- from other threads

    def wake(self, connection: _Connection) -> None:
        """Something has arrived for this connection."""
        self._woken.append(connection)
        self.poke()

    def poke(self) -> None:
        """Wakes the thread up, unless that was done since it last looked."""
        with self._lock:
            if not self._poked:
                self._poked = True
                os.write(self._poker, b"!")

    # ---- on its own thread

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select():
                    if key.data is not None:
                        key.data.ready()
                    elif key.fileobj is self._listener:
                        self._accept()
                    else:
                        os.read(self._waker, 64)
                        self._poked = False
                for _ in range(len(self._woken)):
                    self._woken.popleft().take()
        finally:
            self._closing = True
            for connection in list(self._connections):
                connection.break_off()
            with self._lock:
                self._poked = True  # nothing more is written to the pipe
            self._release()

    def _release(self) -> None:
        self._selector.close()
        self._listener.close()
        for connection in self._connections:
            connection.socket.close()
        for fd in (self._waker, self._poker):
            os.close(fd)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:  # it has already disconnected
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(_PAUSE)
            return
        accepted.setblocking(False)
        host, port = self._place
        try:
            connection = _Connection(self, accepted, messages.Connect(host=host, port=port), self._node)
        except SkyfabError as error:
            accepted.close()
            self.tell(error.message)
            return
        self._connections.add(connection)

    def watch(self, connection: _Connection, events: int) -> None:
        if connection.events and events:
            self._selector.modify(connection.socket, events, connection)
        elif events:
            self._selector.register(connection.socket, events, connection)
        elif connection.events:
            self._selector.unregister(connection.socket)
        connection.events = events

    def forget(self, connection: _Connection) -> None:
        self._connections.discard(connection)

    def refused(self, reason: str) -> None:
        host, port = self._place
        place = f"{host}:{port}" if host else f"port {port}"
        is_free = reason == "connection refused"
        self.tell(f"nothing listens at {place} yet" if is_free else f"{place} cannot be reached: {reason}")

    def tell(self, text: str) -> None:
        """Says this, unless it was the last thing that was said."""
        if text and text != self._told:
            self._events.emit(Notice(host=self._node.name, text=text))
        self._told = text


class _Connection:
    """One connection of a program on this machine."""

    def __init__(self, forward: Forward, accepted: socket.socket, message: messages.Connect, node: Node) -> None:
        """Raises HostLost."""
        self._forward = forward
        self._lock = threading.Lock()
        """Protects the relay: the reading thread writes what arrives at once, which saves waking another one."""
        self._arrived: deque[messages.Message | None] = deque()
        self.socket = accepted
        self.events = 0
        self._is_closed = False
        with self._lock:
            self._channel = Channel(node.session.connection, message, self)
            self._relay = Relay(self._channel)
            self._relay.begin(accepted)
            self._go_on()

    # ---- from other threads

    def on_message(self, message: messages.Message | None) -> None:
        self._arrived.append(message)
        self._forward.wake(self)

    def on_data(self, view: memoryview) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._relay.data(view)
            is_done = not self._relay.wants_write and not self._relay.is_over
        if not is_done:
            self._forward.wake(self)

    def on_room(self) -> None:
        self._forward.wake(self)

    # ---- on the forward's thread

    def ready(self) -> None:
        """The socket can be read or written."""
        with self._lock:
            self._relay.ready()
            self._go_on()

    def take(self) -> None:
        """Handles what has arrived, and goes on."""
        while self._arrived and not self._is_closed:
            self._handle(self._arrived.popleft())
        with self._lock:
            self._go_on()

    def _handle(self, arrived: messages.Message | None) -> None:
        if isinstance(arrived, messages.Done):
            self._forward.tell("")
        elif isinstance(arrived, messages.Shut):
            try:
                with self._lock:
                    self._relay.shut(arrived)
            except ProtocolError:
                self.break_off()
        else:
            if isinstance(arrived, messages.Failed):
                self._forward.refused(arrived.text)
            self.break_off()

    def _go_on(self) -> None:
        if self._is_closed:
            return
        if self._relay.is_over:
            self._close()
            self._channel.finish(drop=self._relay.is_refused)
        else:
            read, write = self._relay.wants_read, self._relay.wants_write
            events = (selectors.EVENT_READ if read else 0) | (selectors.EVENT_WRITE if write else 0)
            if events != self.events:
                self._forward.watch(self, events)

    def break_off(self) -> None:
        with self._lock:
            self._relay.break_off()
            self._channel.break_off()
            self._close()

    def _close(self) -> None:
        self._is_closed = True
        self._forward.watch(self, 0)
        self._forward.forget(self)
        self.socket.close()


class ForwardsPorts(abc.ABC):
    """The part of a pool that forwards ports."""

    hosts: Sequence[Node]
    events: Events
    _forwards: Sequence[Forward] = ()

    def forward(self, port: int | str, *, on: str = "head", local: int | None = None) -> Forward:
        """Makes a port of a host one of 127.0.0.1 here, over the connection that is there (docs/forward.md).

        `port` is one of the host itself, or ``"name:port"`` of a machine that it can connect to. `on` is a host, or
        "head". `local` is the port here; None: the same one if it is free, else any; 0: any. It is closed with the
        pool. Raises UsageError.
        """
        self._check_open()
        opened = Forward(named(self.hosts, on), _place(port), local, self.events)
        self._forwards = [*(one for one in self._forwards if not one.is_closed), opened]
        return opened

    @abc.abstractmethod
    def _check_open(self) -> None:
        """Raises UsageError unless the pool is open."""

    def _close_forwards(self) -> None:
        for one in self._forwards:
            one.close()

    def _leave_forwards_to_parent(self) -> None:
        for one in self._forwards:
            if not one.is_closed:
                one.leave_to_parent()


def _place(port: int | str) -> tuple[str, int]:
    """Where on the host, as name and number; no name for the host itself.

    >>> _place(6006), _place("db:5432"), _place("[fd00::1]:80")
    (('', 6006), ('db', 5432), ('fd00::1', 80))
    """
    match = re.fullmatch(r"(?:\[([^\]]+)\]:|([^:\s]+):)?([0-9]{1,5})", str(port), re.ASCII)
    if match is None or isinstance(port, bool) or not 0 < int(match[3]) < 65536:
        raise UsageError(f"{port!r:.60} is not a port", hint='a number from 1 to 65535, or "name:number"')
    return match[1] or match[2] or "", int(match[3])


def _is_here(host: Host) -> bool:
    """Whether the host's ports are this machine's own: forwarded to the same number, one would lead to itself."""
    return host.transport == "local" or (host.destination in ("localhost", _LOOPBACK, "::1") and not host.jump)


def _listen(wanted: int, local: int | None, *, taken: int) -> socket.socket:
    """A socket that listens at this port of the loopback interface, or at another one if that may be; not at `taken`.

    Raises UsageError.
    """
    if local is not None and not 0 <= local < 65536:
        raise UsageError(f"local={local} is not a port", hint="a number from 1 to 65535, or 0 for any that is free")
    if local == taken and local:
        raise UsageError(
            f"port {local} of this machine is the one that it should lead to", hint="local=0 takes another"
        )
    for number in ([0] if wanted == taken else [wanted, 0]) if local is None else [local]:
        listener = socket.socket()
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((_LOOPBACK, number))
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            return listener
        except OSError as error:
            listener.close()
            reason = (error.strerror or str(error)).lower()
    raise UsageError(f"port {local} of this machine cannot be used: {reason}", hint="local=0 takes one that is free")
