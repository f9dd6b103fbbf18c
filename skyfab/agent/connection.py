"""A connection: the two ends that a link has handed over."""

from __future__ import annotations

import array
import fcntl
import functools
import io
import os
import select
import sys
import termios
from socket import SOL_SOCKET

from skyfab.protocol.pipes import widen

TYPE_CHECKING = False  # a cold host has no time for `typing`
if TYPE_CHECKING:
    import socket
    from typing import Final

    from skyfab.protocol.frames import RecvInto
    from skyfab.protocol.mux import Send


SO_PEERCRED: Final = 17
"""Linux's number: some builds of Python do not have the name."""
_ANCESTORS: Final = 8
"""Shells and wrappers between sshd and the link, at the most."""


class Connection:
    """The stdin and stdout of a link, and the link, which sleeps until we let go."""

    def __init__(self, link: socket.socket, source: int, sink: int) -> None:
        self._link = link
        self.source = source
        self.sink = sink
        for fd in (source, sink):
            os.set_blocking(fd, False)
            os.set_inheritable(fd, False)
            widen(fd)
        self._server = _server_of(link)
        self.greeted = False
        """The client has said hello on it; else it is one of several attempts."""
        self.recv_into: RecvInto = io.FileIO(source, closefd=False).readinto
        self.send: Send = functools.partial(os.writev, sink)

    def has_data(self) -> bool:
        """Something can be read that is not the end."""
        count = array.array("i", [0])
        fcntl.ioctl(self.source, termios.FIONREAD, count)
        return count[0] > 0

    def is_there(self) -> bool:
        """One direction at least is still open at the other end, or sshd still holds the connection.

        When a program ends while its ranks print, ssh closes both directions in good order, and stays until the link
        has ended. Where a connection breaks, both are gone, and its sshd with them.
        """
        poll = select.poll()
        for fd in (self.source, self.sink):
            poll.register(fd, 0)  # what is wrong with it is told unasked
        return len(poll.poll(0)) < 2 or (self._server is not None and _about(self._server[0])[2:] == self._server[1:])

    def close(self) -> None:
        for fd in {self.source, self.sink}:
            os.close(fd)
        self._link.close()


def _server_of(link: socket.socket) -> tuple[int, str] | None:
    """The sshd that the link belongs to, and when it started; None where there is none, or nothing tells."""
    try:
        peer = link.getsockopt(SOL_SOCKET, SO_PEERCRED, 12)
    except OSError:
        return None
    pid = int.from_bytes(peer[:4], sys.byteorder)
    for _ in range(_ANCESTORS):
        name, parent, started = _about(pid)
        if name.startswith("sshd"):  # newer ones are called sshd-session
            return pid, started
        pid = parent
    return None


def _about(pid: int) -> tuple[str, int, str]:
    """The name, the parent and the start of a process that lives; empty where it does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            before, _, after = file.read().rpartition(")")
    except OSError:
        return "", 0, ""
    fields = after.split()
    return ("", 0, "") if fields[0] in "ZX" else (before.partition("(")[2], int(fields[1]), fields[19])
