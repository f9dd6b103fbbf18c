"""Ports: where ranks will meet, bound before anybody is told the number; and who can be reached from here."""

from __future__ import annotations

import os
import select
import socket
import time

_PATIENCE = 1.0
"""Seconds in which a peer must answer."""


class Ports:
    """Sockets that listen, until a process takes one over."""

    def __init__(self) -> None:
        self._sockets: dict[int, socket.socket] = {}

    def open(self, address: str) -> int:
        """Listens at a free port of this address, or of all where it is not this machine's; returns its number."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family)
        try:
            listener.bind((address, 0))
        except OSError:
            listener.bind(("", 0))
        listener.listen(2048)
        port = int(listener.getsockname()[1])
        self._sockets[port] = listener
        return port

    def hand_over(self, port: int) -> int:
        """The descriptor of a socket that listens there, now the caller's to close; -1 where there is none."""
        listener = self._sockets.pop(port, None)
        return -1 if listener is None else listener.detach()

    def close(self, port: int) -> None:
        fd = self.hand_over(port)
        if fd >= 0:
            os.close(fd)

    def close_all(self) -> None:
        for port in list(self._sockets):
            self.close(port)


def reach(peers: list[list[str]]) -> tuple[list[list[str]], str]:
    """The peers that cannot be connected to, each with the reason, and the interface that leads to the first."""
    failed: list[list[str]] = []
    waiting: dict[int, tuple[socket.socket, list[str]]] = {}
    poll = select.poll()
    for address, port in peers:
        try:
            probe = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            probe.setblocking(False)
            error = probe.connect_ex((address, int(port)))
        except (OSError, ValueError) as trouble:
            failed.append([address, str(trouble)])
            continue
        if error not in (0, 115, 36):  # EINPROGRESS on Linux, on macOS
            failed.append([address, os.strerror(error)])
            probe.close()
            continue
        waiting[probe.fileno()] = (probe, [address, port])
        poll.register(probe, select.POLLOUT)
    deadline = time.monotonic() + _PATIENCE
    while waiting and (left := deadline - time.monotonic()) > 0:
        for fd, _ in poll.poll(left * 1000):
            probe, (address, _) = waiting.pop(fd)
            poll.unregister(fd)
            error = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                failed.append([address, os.strerror(error)])
            probe.close()
    for probe, (address, _) in waiting.values():
        failed.append([address, "no answer"])
        probe.close()
    return failed, interface_towards(peers[0][0]) if peers else ""


def interface_towards(address: str) -> str:
    """The name of the interface through which an address is reached; empty where nobody says."""
    if not hasattr(socket, "if_nameindex"):
        return ""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            own = probe.getsockname()[0]
    except OSError:
        return ""
    return next((name for _, name in socket.if_nameindex() if own in _addresses(name, family)), "")


def _addresses(interface: str, family: int) -> list[str]:
    """The addresses of an interface, as Linux tells them."""
    if family == socket.AF_INET6:
        return _six(interface)
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:  # SIOCGIFADDR
            answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return []
    return [socket.inet_ntoa(answer[20:24])]


def _six(interface: str) -> list[str]:
    try:
        with open("/proc/net/if_inet6") as lines:
            words = [line.split() for line in lines]
    except OSError:
        return []
    return [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(word[0])) for word in words if word[-1] == interface]
