"""One SSH connection as the agent holds it: the stdin and stdout that a link process has passed on."""

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

from skyfab.protocol.pipes import Lender, widen

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    import socket
    from typing import Final

    from skyfab.protocol.frames import RecvInto
    from skyfab.protocol.mux import Send


SO_PEERCRED: Final = 17
"""Linux's value: some builds of Python do not define the name."""
_ANCESTORS: Final = 8
"""Maximum number of shells and wrappers between sshd and the link."""


class Connection:
    """The stdin and stdout of a link, and the socket to the link, which exits when the socket is closed."""

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
        """The client has sent hello on it; else it is one of several connection attempts."""
        self.recv_into: RecvInto = io.FileIO(source, closefd=False).readinto
        self.send: Send = functools.partial(os.writev, sink)
        self.lend = Lender(self, lambda: sink)

    def has_data(self) -> bool:
        """Whether data can be read, and not just end of file."""
        count = array.array("i", [0])
        fcntl.ioctl(self.source, termios.FIONREAD, count)
        return count[0] > 0

    def is_there(self) -> bool:
        """Whether at least one direction is still open at the other end, or the connection's sshd still runs.

        When a program exits while its workers print, ssh closes both directions in order, and sshd stays until the link
        has exited. When a connection breaks, both directions and the sshd are lost.
        """
        poll = select.poll()
        for fd in (self.source, self.sink):
            poll.register(fd, 0)  # errors and hang-ups are always reported
        return len(poll.poll(0)) < 2 or (self._server is not None and _about(self._server[0])[2:] == self._server[1:])

    def close(self) -> None:
        for fd in {self.source, self.sink}:
            os.close(fd)
        self._link.close()


def _server_of(link: socket.socket) -> tuple[int, str] | None:
    """The pid of the sshd that the link belongs to, and its start time; None if it has none or it is not found."""
    try:
        peer = link.getsockopt(SOL_SOCKET, SO_PEERCRED, 12)
    except OSError:
        return None
    pid = int.from_bytes(peer[:4], sys.byteorder)
    for _ in range(_ANCESTORS):
        name, parent, started = _about(pid)
        if name.startswith("sshd"):  # newer versions use sshd-session
            return pid, started
        pid = parent
    return None


def _about(pid: int) -> tuple[str, int, str]:
    """The name, parent and start time of a running process; empty values if it does not run."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            before, _, after = file.read().rpartition(")")
    except OSError:
        return "", 0, ""
    fields = after.split()
    return ("", 0, "") if fields[0] in "ZX" else (before.partition("(")[2], int(fields[1]), fields[19])
