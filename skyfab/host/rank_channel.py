"""The rank channel: how the ranks of a broadcast talk to rank 0, without the client.

Rank 0 makes a `Head` from the socket that already listens at the rendezvous port (`plugins.base.OwnPort` leaves it to
the call). Every rank, including rank 0, connects a `Channel`::

    head = Head(socket.socket(fileno=context.take_listener()), secret, handle, gone)      # on rank 0
    channel = Channel.connect(info.head_addr, info.head_port, secret, info.rank)
    channel.send({"op": "ended"})          # calls `handle(rank, message)` on rank 0
    channel.receive(timeout=1.0)           # the next message of rank 0: what `handle` returned, or head.push(message)

A message is a JSON object in one line, after an HMAC. Its key is derived from the secret and from random numbers of
both ends. So both have proven with their first line that they know the secret, and a line that was changed, repeated or
injected ends the connection. Messages are not encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import queue
import socket
import threading
import time

TYPE_CHECKING = False  # as in all modules that hosts import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Message = dict[str, Any]

MOST = 256 * 1024
"""Bytes of a line."""
_GREETING = 5.0
"""Seconds for each step until a peer has proven that it knows the secret."""
_MOST_UNPROVEN = 64
"""Peers that have not proven it yet: any machine can connect. For one more, the one that waits longest is dropped."""
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
"""A machine that no longer responds is noticed after 25 s."""


class ChannelLost(ConnectionError):
    """The other end is gone, or has sent something other than messages."""


class _Lines:
    """Messages over one connection. Any thread may send, one reads. All methods raise OSError, such as ChannelLost."""

    def __init__(self, connection: socket.socket, secret: bytes, *, is_head: bool) -> None:
        """Exchanges random numbers with the other end, and derives the key."""
        self.socket = connection
        self._file = connection.makefile("rb")
        self._names = (b"head", b"rank") if is_head else (b"rank", b"head")
        """Part of what is signed, by this end and by the other one."""
        self._sent = self._received = 0
        self._lock = threading.Lock()
        own = os.urandom(32).hex().encode()
        connection.sendall(own + b"\n")
        theirs = self._file.readline(len(own) + 1).rstrip(b"\n")
        self._key = hmac.digest(secret, b" ".join((own, theirs) if is_head else (theirs, own)), "sha256")

    def _sign(self, name: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, b"%s %d %s" % (name, number, body), "sha256").hex().encode()

    def send(self, message: Message) -> None:
        """Raises ValueError for a message that is too long."""
        body = json.dumps(message).encode()
        if len(body) > MOST - 100:
            raise ValueError(f"a message of {len(body)} bytes is too long")
        with self._lock:
            self._sent += 1
            self.socket.sendall(b"%s %s\n" % (self._sign(self._names[0], self._sent, body), body))

    def read(self) -> Message:
        line = self._file.readline(MOST)
        if not line:
            raise ChannelLost("the connection has ended")
        self._received += 1
        signature, _, body = line.rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(signature, self._sign(self._names[1], self._received, body)):
            raise ChannelLost("it has sent something other than messages signed with this secret")
        message: Message = json.loads(body)
        return message

    def keep_alive(self) -> None:
        """From now on, waits for messages without a timeout."""
        self.socket.settimeout(None)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # not on every system
                self.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def close(self) -> None:
        """Called by the thread that reads."""
        self._file.close()
        self.socket.close()


class Head:
    """Rank 0's end: handles the messages of all ranks, and sends them messages."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        handle: Callable[[int, Message], Message | None],
        gone: Callable[[int], None] = lambda rank: None,
    ) -> None:
        """Accepts ranks, on threads, one for each: `handle` may wait without delaying the messages of other ranks.

        `handle` is called with a rank and its message, and returns the reply, or None if there is none. `gone` is
        called when a rank is gone, but not after `close`.
        """
        self._listener = listener
        self._secret = secret
        self._handle = handle
        self._gone = gone
        self._ranks: dict[int, _Lines] = {}
        self._unproven: list[socket.socket] = []
        self._lock = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._accept, name="skyfab-ranks", daemon=True).start()

    @property
    def ranks(self) -> set[int]:
        """The ranks that are connected."""
        return set(self._ranks)

    def push(self, message: Message, rank: int | None = None) -> None:
        """Sends a message to a rank, or to all. Does nothing for one that is gone: `gone` reports it."""
        for one in sorted(self.ranks, reverse=True) if rank is None else [rank]:  # rank 0 may close when it has it
            with contextlib.suppress(KeyError, OSError):
                self._ranks[one].send(message)

    def close(self) -> None:
        """Ends all connections, which every rank notices."""
        with self._lock:
            self._is_closed = True
            for connection in (self._listener, *(lines.socket for lines in self._ranks.values())):
                _shut(connection)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                time.sleep(0.1)  # closed, or no descriptor is free
                continue
            with self._lock:
                self._unproven.append(peer)
                if len(self._unproven) > _MOST_UNPROVEN:
                    _shut(self._unproven.pop(0))
            threading.Thread(target=self._attend, args=(peer,), name="skyfab-rank", daemon=True).start()
        self._listener.close()

    def _attend(self, peer: socket.socket) -> None:
        """Finds out if a peer is a rank, and if so, handles its messages until it goes."""
        rank, is_here = -1, False
        try:
            peer.settimeout(_GREETING)
            lines = _Lines(peer, self._secret, is_head=True)
            number = int(lines.read()["rank"])
            lines.keep_alive()
            with self._lock:
                if self._is_closed or number in self._ranks:
                    return
                self._ranks[number] = lines
                self._unproven = [one for one in self._unproven if one is not peer]
            rank = number
            lines.send({"welcome": rank})
            lines.read()  # it has read that in time: else it tries again, and has not gone
            is_here = True
            while True:
                if (reply := self._handle(rank, lines.read())) is not None:
                    lines.send(reply)
        except OSError:
            pass  # not a rank, or it is gone
        finally:
            with self._lock:
                self._unproven = [one for one in self._unproven if one is not peer]
                self._ranks.pop(rank, None)
            peer.close()
            if is_here and not self._is_closed:
                self._gone(rank)


class Channel:
    """A rank's end, made by `connect`."""

    def __init__(self, connection: socket.socket, secret: bytes, rank: int) -> None:
        """Raises OSError unless both ends have proven that they know the secret."""
        self._lines = _Lines(connection, secret, is_head=False)
        self._lines.send({"rank": rank})
        self._lines.read()
        self._lines.send({"joined": rank})
        self._lines.keep_alive()
        self._received: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="skyfab-channel", daemon=True).start()

    @classmethod
    def connect(cls, address: str, port: int, secret: bytes, rank: int, *, timeout: float = 60.0) -> Channel:
        """Connects to rank 0, and retries until it responds. Raises ChannelLost after `timeout` seconds."""
        until = time.monotonic() + timeout
        while True:
            connection = None
            try:
                connection = socket.create_connection((address, port), _GREETING)
                return cls(connection, secret, rank)
            except OSError as error:
                if connection is not None:
                    connection.close()
                if time.monotonic() > until:
                    raise ChannelLost(f"rank {rank} cannot reach rank 0 at {address}:{port}: {error}") from None
            time.sleep(0.2)

    def send(self, message: Message) -> None:
        """Sends a message to rank 0. Does nothing if that is gone: `receive` reports it."""
        with contextlib.suppress(OSError):
            self._lines.send(message)

    def receive(self, timeout: float | None = None) -> Message | None:
        """Waits for the next message of rank 0; None after `timeout`. Raises ChannelLost after the last one."""
        try:
            message = self._received.get(timeout=timeout)
        except queue.Empty:
            return None
        if message is None:
            self._received.put(None)  # for the next call
            raise ChannelLost("rank 0 is gone")
        return message

    def request(self, message: Message) -> Message:
        """Sends a message, and returns the reply: rank 0 must not send anything else."""
        self.send(message)
        reply = self.receive()
        assert reply is not None
        return reply

    def close(self) -> None:
        """Ends the connection, which rank 0 notices."""
        _shut(self._lines.socket)

    def _read(self) -> None:
        try:
            with contextlib.suppress(OSError):
                while True:
                    self._received.put(self._lines.read())
        finally:
            self._received.put(None)
            self._lines.close()


def _shut(connection: socket.socket) -> None:
    """Ends a connection also for the thread that reads from it, which then closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
