"""Passes bytes between a TCP socket and a stream of the connection, both ways: the same on a host and on this machine.

Nothing here waits: what one side cannot take yet stays with the other, up to the limits of the stream.
"""

from __future__ import annotations

import socket
import struct
from collections import deque

from skyfab.errors import ProtocolError
from skyfab.protocol.frames import CHUNK

TYPE_CHECKING = False  # see frames.py
if TYPE_CHECKING:
    from typing import Protocol

    from skyfab.protocol.messages import Shut
else:
    Protocol = object


class Channel(Protocol):
    """The stream of a forwarded connection, to the other machine."""

    paused: bool
    """So much of this side's data is queued that no more should be read."""

    def send(self, data: bytes) -> None: ...
    def used(self, count: int) -> None:
        """So many bytes of the other side's data have been consumed."""

    def shut(self, total: int, broken: bool) -> None:
        """Sends Shut."""


class Relay:
    """One connection, until both directions have ended. Its owner then closes the socket."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._socket: socket.socket | None = None
        self._pending: deque[memoryview] = deque()
        """What the socket has not taken yet."""
        self._sent = self._received = 0
        self._end: int | None = None
        """After so many bytes, the other side sends nothing more."""
        self._reads = self._writes = True
        """The directions that have not ended: from the socket, and to it."""
        self._refuses = False
        """The program at the socket takes nothing more."""
        self.is_refused = False
        """The other side takes nothing more."""

    @property
    def is_over(self) -> bool:
        return not self._reads and not self._writes

    @property
    def wants_read(self) -> bool:
        return self._reads and not self._channel.paused

    @property
    def wants_write(self) -> bool:
        return bool(self._pending)

    def begin(self, connected: socket.socket) -> None:
        """Takes the socket, which must not block, and writes what has arrived already."""
        self._socket = connected
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._write()

    def ready(self) -> None:
        """Reads and writes what is possible."""
        self._write()
        self._read()

    def data(self, view: memoryview) -> None:
        """The other side has sent this."""
        self._received += len(view)
        if self._refuses:
            self._channel.used(len(view))
        else:
            self._pending.append(view)
        self._write()

    def shut(self, message: Shut) -> None:
        """The other side sends no more. Raises ProtocolError for an end that is over already."""
        if message.total < self._received and not message.broken:
            raise ProtocolError(f"an end after {message.total} bytes, and there are {self._received}")
        self._end = message.total
        if message.broken:
            self.is_refused, self._reads = True, False
        self._write()

    def break_off(self) -> None:
        """Ends both directions. Closing the socket then tells the program there that this is no regular end."""
        self._reads = self._writes = False
        self._pending.clear()
        if self._socket is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _read(self) -> None:
        if self._socket is None or not self.wants_read:
            return
        try:
            data = self._socket.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:  # the program has broken it off
            data = b""
            self._refuse()
        if data:
            self._sent += len(data)
            self._channel.send(data)
        else:
            self._reads = False
            self._channel.shut(self._sent, self._refuses)

    def _write(self) -> None:
        if self._socket is None or not self._writes:
            return
        try:
            while self._pending:
                count = self._socket.send(self._pending[0])
                self._channel.used(count)
                if count == len(self._pending[0]):
                    self._pending.popleft()
                else:
                    self._pending[0] = self._pending[0][count:]
            if self._end is not None and self._received >= self._end:
                self._writes = False
                if self.is_refused:
                    self.break_off()
                else:
                    self._socket.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:  # what the program wrote before can still be read
            self._refuse()
            if not self._reads:
                self._channel.shut(self._sent, True)

    def _refuse(self) -> None:
        self._pending.clear()
        self._refuses, self._writes = True, False
