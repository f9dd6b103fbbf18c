"""Ports: where ranks will meet, bound before the number is told; and where other hosts may try to reach this one."""

from __future__ import annotations

import os
import socket

from skyfab.agent.poller import READ

TYPE_CHECKING = False  # a cold host has no time for `typing`
if TYPE_CHECKING:
    from skyfab.agent.poller import Poller


class Ports:
    """Sockets that listen, until a process takes one over."""

    def __init__(self, watch: Poller) -> None:
        self._poller = watch
        self._sockets: dict[int, socket.socket] = {}

    def open(self, address: str = "", word: str = "") -> int:
        """Listens at a free port of this address, or of all where it is not this machine's; returns its number.

        With a `word`, whoever connects is told it, at any address of the machine.
        """
        listener = _everywhere() if word else _at(address)
        listener.listen(2048)
        port = int(listener.getsockname()[1])
        self._sockets[port] = listener
        if word:
            listener.setblocking(False)
            self._poller.add(listener.fileno(), READ, lambda: _tell(listener, word))
        return port

    def hand_over(self, port: int) -> int:
        """The descriptor of a socket that listens there, now the caller's to close; -1 where there is none."""
        listener = self._sockets.pop(port, None)
        if listener is None:
            return -1
        self._poller.drop(listener.fileno())
        return listener.detach()

    def close(self, port: int) -> None:
        fd = self.hand_over(port)
        if fd >= 0:
            os.close(fd)

    def close_all(self) -> None:
        for port in list(self._sockets):
            self.close(port)


def _at(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.bind((address, 0))
    except OSError:
        listener.bind(("", 0))
    return listener


def _everywhere() -> socket.socket:
    """By IPv4 and by IPv6, where there is such a thing."""
    listener = None
    try:
        listener = socket.socket(socket.AF_INET6)
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("::", 0))
    except OSError:
        if listener is not None:
            listener.close()
        return _at("")
    return listener


def _tell(listener: socket.socket, word: str) -> None:
    try:
        connection, _ = listener.accept()
    except OSError:  # it has hung up
        return
    with connection:
        connection.setblocking(False)
        try:
            connection.send(word.encode())
        except OSError:
            pass
