"""Listening TCP sockets of the agent: for a gang's rendezvous, and for reachability probes by other hosts.

A rendezvous port is bound before its number is sent, so that no other process can take it.
"""

from __future__ import annotations

import contextlib
import os
import socket

from skyfab.host.agent.poller import READ

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from skyfab.host.agent.poller import Poller

_BACKLOG = 2048


class Ports:
    """Listening sockets, until they are passed to a process or closed."""

    def __init__(self, watch: Poller) -> None:
        self._poller = watch
        self._sockets: dict[int, socket.socket] = {}

    def open(self, address: str = "", word: str = "") -> int:
        """Listens on a free port of this address, or of all addresses if it is not this host's; returns the port.

        With a `word`, listens on all addresses of the host and sends the word to each peer that connects.
        """
        listener = listen_everywhere() if word else _at(address)
        port = int(listener.getsockname()[1])
        self._sockets[port] = listener
        if word:
            listener.setblocking(False)
            self._poller.add(listener.fileno(), READ, lambda: _tell(listener, word))
        return port

    def hand_over(self, port: int) -> int:
        """The descriptor of the socket that listens on the port, which the caller must close; -1 if there is none."""
        listener = self._sockets.pop(port, None)
        if listener is None:
            return -1
        self._poller.drop(listener.fileno())
        return listener.detach()

    def close(self, port: int) -> None:
        fd = self.hand_over(port)
        if fd >= 0:
            os.close(fd)


def _at(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    except OSError:
        return socket.create_server(("", 0), family=family, backlog=_BACKLOG)


def listen_everywhere() -> socket.socket:
    """A socket for all IPv4 and IPv6 addresses; IPv4 only if the system has no IPv6."""
    try:
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    except (OSError, ValueError):
        return _at("")


def _tell(listener: socket.socket, word: str) -> None:
    try:
        connection, _ = listener.accept()
    except OSError:  # the peer has already disconnected
        return
    with connection, contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.send(word.encode())
