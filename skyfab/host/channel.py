"""Channels: TLS connections on which a worker of one host sends data to a worker of another.

Items go one way over a channel: tensors of a device, or chunks of a relay. Both ends present the certificate that the
client has made for this channel, and accept no other one. The end that receives asks for each item by its number,
and is sent as many bytes as it expects, or the reason why there are none. So neither end holds more than it was
asked to, and an end that waits is waiting for a machine that responds.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import ssl

TIMEOUT: Final = 5.0
"""Seconds for a connection, and for each step of its handshake."""
_LISTENING: Final = 30.0
"""Seconds for which a port is open if the other end does not connect."""
_MOST_UNPROVEN: Final = 16
"""Connections that may be in a handshake at once: any machine can connect to a port."""
_MOST_WAITING: Final = 256 * 1024 * 1024
"""Bytes that may wait to be sent. A worker that has more to send waits, but one item may have any size."""
_CHUNK: Final = 1 << 24
_SILENCE: Final = 60
"""Seconds without a packet after which the other machine is considered lost."""
_TEXT: Final = 2000
_ASKED: Final = struct.Struct("!Q?")
"""From the end that receives: an item's number, and if it is wanted. It no longer needs earlier ones."""
_SENT: Final = struct.Struct("!Q?Q")
"""An item's number, if there is one, and the length of what follows: its bytes, or the reason."""
_READY: Final = b"\1"
"""The end that listens has taken this connection. In TLS 1.3 the other one would not know."""


class ChannelBroken(RuntimeError):
    """The channel can no longer be used."""


class NotSent(RuntimeError):
    """The other worker has nothing to send: it has failed before."""


class Channel:
    """One end of a channel."""

    def __init__(self, peer: str, certificate: str, key: str) -> None:
        self._peer = peer
        """The name of the other host."""
        self._certificate = certificate
        self._key = key
        self._socket: ssl.SSLSocket | None = None
        self._is_taken = False
        """A connection with the other end was accepted."""
        self._is_closed = False
        self._changed = threading.Condition()
        self._sender: threading.Thread | None = None
        self._waiting: dict[int, memoryview | str] = {}
        """Items to be sent, or reasons, by their number."""
        self._size = 0
        """Bytes of those that wait."""
        self._unwanted = 0
        """The last number that will not be asked for."""
        self._asked = -1
        """The last number that this end has asked for."""
        self.received = 0
        """Bytes, those of items that are not complete included."""

    # ---- connecting

    def listen(self, addresses: Sequence[str]) -> list[int]:
        """Waits for the other end on a thread, at a port of each address. Returns the ports; 0 where there is none."""
        context = self._context(server=True)
        servers: list[socket.socket | None] = []
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                servers.append(socket.create_server((address, 0), family=family))
            except OSError:
                servers.append(None)
        found = [server for server in servers if server is not None]
        threading.Thread(target=self._accept, args=(context, found), daemon=True).start()
        return [0 if server is None else int(server.getsockname()[1]) for server in servers]

    def _accept(self, context: ssl.SSLContext, servers: Sequence[socket.socket]) -> None:
        until = time.monotonic() + _LISTENING
        unproven: set[ssl.SSLSocket] = set()

        def prove(other: ssl.SSLSocket) -> None:
            self._shake_hands(other)
            unproven.discard(other)

        poll = select.poll()
        for server in servers:
            poll.register(server, select.POLLIN)
        while self._socket is None and not self._is_closed and time.monotonic() < until:
            ready = {fd for fd, _ in poll.poll(100)}
            for server in servers:
                if server.fileno() in ready:
                    with contextlib.suppress(OSError):
                        connection, _ = server.accept()
                        other = _wrapped(context, connection, server=True)
                        if len(unproven) < _MOST_UNPROVEN:
                            unproven.add(other)
                            threading.Thread(target=prove, args=(other,), daemon=True).start()
                        else:
                            other.close()
        for server in servers:
            server.close()
        for other in list(unproven):
            if other is not self._socket:
                _stop(other)  # its thread ends

    def connect(self, endpoints: Sequence[tuple[str, int]], seconds: float = 2 * TIMEOUT) -> bool:
        """Tries all endpoints (address, port) at once. Returns whether it reached the other end in time."""
        context = self._context(server=False)
        missing = len(endpoints)

        def call(endpoint: tuple[str, int]) -> None:
            nonlocal missing
            try:
                self._shake_hands(_wrapped(context, socket.create_connection(endpoint, TIMEOUT), server=False))
            except OSError:
                pass
            finally:
                with self._changed:
                    missing -= 1
                    self._changed.notify_all()

        for endpoint in endpoints:
            threading.Thread(target=call, args=(endpoint,), daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._socket is not None or not missing, seconds)
            return self._socket is not None

    def _shake_hands(self, other: ssl.SSLSocket) -> None:
        """Finds out if it is the other end. A connection with anyone else is closed."""
        try:
            other.do_handshake()
            if other.server_side:
                with self._changed:
                    is_first, self._is_taken = not self._is_taken, True
                if is_first:
                    other.sendall(_READY)
                    self._use(other)
            elif other.recv(1) == _READY:
                self._use(other)
        except (OSError, ValueError):
            pass
        if other is not self._socket:
            other.close()

    def _use(self, connection: ssl.SSLSocket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("KEEPIDLE", 10), ("KEEPINTVL", 10), ("KEEPCNT", 5), ("USER_TIMEOUT", _SILENCE * 1000)):
            if hasattr(socket, f"TCP_{option}"):  # not everywhere
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), value)
        with self._changed:
            if not self._is_closed:
                self._socket = connection
                self._changed.notify_all()

    def _context(self, *, server: bool) -> ssl.SSLContext:
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate is for this channel, not for a name
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self._certificate)
        with _file_of(self._certificate + self._key) as path:
            context.load_cert_chain(path)
        return context

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._size = 0
            self._changed.notify_all()
        if self._socket is not None:
            _stop(self._socket)

    # ---- sending

    def send(self, number: int, data: memoryview | str) -> None:
        """Keeps the bytes of an item, or the reason why there are none, until the other end asks for it.

        If the channel is broken nothing happens: the other end reports that.
        """
        self.serve(self._next)
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or not self._waiting or self._size + len(data) <= _MOST_WAITING
            )
            if not self._is_closed and number > self._unwanted:
                self._waiting[number] = data
                self._size += len(data)
                self._changed.notify_all()

    def serve(self, find: Callable[[int], memoryview | str]) -> None:
        """From now on, sends the items that the other end asks for; `find` waits for the one that has a number."""
        with self._changed:
            if self._sender is None:
                self._sender = threading.Thread(target=self._send_all, args=(find,), daemon=True)
                self._sender.start()

    def _send_all(self, find: Callable[[int], memoryview | str]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._socket is not None or self._is_closed, _LISTENING)
        try:
            while True:
                number, is_wanted = _ASKED.unpack(self._read(bytearray(_ASKED.size)))
                self._drop(number - is_wanted)
                if is_wanted:
                    data = find(number)
                    is_there = not isinstance(data, str)
                    content = memoryview(data.encode()[:_TEXT]) if isinstance(data, str) else data
                    self._write(_SENT.pack(number, is_there, len(content)))
                    for at in range(0, len(content), _CHUNK):
                        self._write(content[at : at + _CHUNK])
                    del data, content
        except (OSError, ValueError, IndexError):
            self.close()

    def _drop(self, last: int) -> None:
        with self._changed:
            self._unwanted = max(self._unwanted, last)
            for number in [number for number in self._waiting if number <= last]:
                self._size -= len(self._waiting.pop(number))
            self._changed.notify_all()

    def _next(self, number: int) -> memoryview | str:
        """Waits for the item. They come in the order of their numbers."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._waiting)
            if self._is_closed:
                raise ConnectionError("closed")
            if number not in self._waiting:
                return "it was never computed"
            data = self._waiting.pop(number)
            self._size -= len(data)
            self._changed.notify_all()
            return data

    # ---- receiving

    def ask(self, number: int) -> None:
        """Asks for an item, unless that was done. Its sender reads this when it has sent those before it."""
        if number > self._asked:
            try:
                self._write(_ASKED.pack(number, True))
            except OSError:  # `receive` says so
                self.close()
            self._asked = number

    def receive(self, number: int, into: memoryview) -> None:
        """Fills memory with an item. Raises NotSent if the other worker has none, and ChannelBroken."""
        self.ask(number)
        try:
            found, is_there, length = _SENT.unpack(self._read(bytearray(_SENT.size)))
            if found != number or (length != len(into) if is_there else length > _TEXT):
                raise ValueError("it sent unexpected data")
            reason = self._read(into if is_there else bytearray(length))
        except (OSError, ValueError) as error:
            self.close()
            raise ChannelBroken(f"the connection from {self._peer} ended: {error}") from None
        except BaseException:
            self.close()  # in the middle of an item
            raise
        if not is_there:
            raise NotSent(f"{self._peer} did not send it: {bytes(reason).decode(errors='replace')}")

    def skip(self, number: int) -> None:
        """An item is no longer wanted."""
        try:
            self._write(_ASKED.pack(number, False))
        except OSError:
            self.close()

    # ---- bytes

    def _connection(self) -> ssl.SSLSocket:
        with self._changed:
            self._changed.wait_for(lambda: self._socket is not None or self._is_closed, TIMEOUT)
            if self._socket is None or self._is_closed:
                raise ConnectionError("not connected")
            return self._socket

    def _write(self, data: bytes | memoryview) -> None:
        self._connection().sendall(data)

    def _read(self, into: bytearray | memoryview) -> bytearray | memoryview:
        connection = self._connection()
        view, at = memoryview(into), 0
        while at < len(view):
            size = connection.recv_into(view[at:])
            if not size:
                raise ConnectionError("closed by the other host")
            at += size
            self.received += size
        return into


def endpoints_of(addresses: Sequence[str], ports: object) -> list[tuple[str, int]]:
    """The addresses with the ports that a host says it has opened."""
    found = ports if isinstance(ports, list) else []
    pairs = zip(addresses, found, strict=False)
    return [(address, port) for address, port in pairs if type(port) is int and 0 < port < 65536]


def _wrapped(context: ssl.SSLContext, connection: socket.socket, *, server: bool) -> ssl.SSLSocket:
    """A connection before its handshake. Raises OSError."""
    connection.settimeout(TIMEOUT)
    with connection:  # afterwards the descriptor is that of the result
        return context.wrap_socket(connection, server_side=server, do_handshake_on_connect=False)


def _stop(connection: socket.socket) -> None:
    """Ends all reads and writes that wait for it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


@contextlib.contextmanager
def _file_of(text: str) -> Iterator[str]:
    """A path at which the text can be read by this process for a moment: in memory where the system can do that."""
    if hasattr(os, "memfd_create") and Path("/proc/self/fd").exists():
        fd = os.memfd_create("certificate")
        try:
            os.write(fd, text.encode())
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)
    else:
        with tempfile.NamedTemporaryFile("w") as file:  # 0600
            file.write(text)
            file.flush()
            yield file.name
