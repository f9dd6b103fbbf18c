"""A connection: the two ends that a link has handed over."""

from __future__ import annotations

import array
import fcntl
import functools
import io
import os
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
        self.recv_into: RecvInto = io.FileIO(source, closefd=False).readinto
        self.send: Send = functools.partial(os.writev, sink)

    def has_data(self) -> bool:
        """Something can be read that is not the end."""
        count = array.array("i", [0])
        fcntl.ioctl(self.source, termios.FIONREAD, count)
        return count[0] > 0

    def close(self) -> None:
        for fd in {self.source, self.sink}:
            os.close(fd)
        self._link.close()
