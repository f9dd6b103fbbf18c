"""A connection: the two ends that a link has handed over."""

from __future__ import annotations

import array
import fcntl
import functools
import io
import os
import select
import termios

from skyfab.protocol.pipes import widen

TYPE_CHECKING = False  # a cold host has no time for `typing`
if TYPE_CHECKING:
    import socket

    from skyfab.protocol.frames import RecvInto
    from skyfab.protocol.streams import Send


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
        self.greeted = False
        """The client has said hello on it; else it is one of several attempts."""
        self.recv_into: RecvInto = io.FileIO(source, closefd=False).readinto
        self.send: Send = functools.partial(os.writev, sink)

    def has_data(self) -> bool:
        """Something can be read that is not the end."""
        count = array.array("i", [0])
        fcntl.ioctl(self.source, termios.FIONREAD, count)
        return count[0] > 0

    def is_half_open(self) -> bool:
        """One direction at least is still open at the other end. Where a connection breaks, none is."""
        poll = select.poll()
        for fd in (self.source, self.sink):
            poll.register(fd, 0)  # what is wrong with it is told unasked
        return len(poll.poll(0)) < 2

    def close(self) -> None:
        for fd in {self.source, self.sink}:
            os.close(fd)
        self._link.close()
