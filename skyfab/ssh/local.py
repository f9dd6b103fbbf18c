"""The transport to this machine itself, without SSH."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from contextlib import suppress

from skyfab._util.cache import cache_folder, made_cache
from skyfab.inventory.host import Host, expanded
from skyfab.ssh.base import ended
from skyfab.ssh.container import inside
from skyfab.ssh.process import ProcessStream
from skyfab.ssh.tunnel import ThreadTunnel


class Local:
    """Runs the command on this machine."""

    servers = ()

    def __init__(self, host: Host) -> None:
        self._host = host

    def open(self, command: str, stopped: Callable[[], bool] = lambda: False) -> ProcessStream:
        with suppress(RuntimeError):  # there is no home folder
            if expanded(self._host.cache) == cache_folder():
                made_cache()
        return ProcessStream(["/bin/sh", "-c", inside(self._host, command)], functools.partial(ended, self._host))

    def forward(self, port: int, to: tuple[str, int], stopped: Callable[[], bool] = lambda: False) -> ThreadTunnel:
        return ThreadTunnel(port, lambda: socket.create_connection(to))

    def joined(self) -> None:
        pass

    def close(self) -> None:
        pass
