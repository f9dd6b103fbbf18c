"""Transports: a byte stream to a process on a host, over the ssh program, Fabric, or a local process."""

from __future__ import annotations

import shutil

from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.ssh.base import Stream, Transport
from skyfab.ssh.local import Local
from skyfab.ssh.openssh import CONNECT_TIMEOUT, OpenSSH


def transport_for(host: Host, inventory: Inventory, *, connect_timeout: int = CONNECT_TIMEOUT) -> Transport:
    """The transport that the host is configured with; `auto` is the ssh program if it is installed, else Fabric.

    Each server on the path must accept the connection within `connect_timeout` seconds.
    """
    kind = host.transport
    if kind == "auto":
        kind = "openssh" if shutil.which("ssh") else "fabric"
    if kind == "local":
        return Local(host)
    if kind == "openssh":
        return OpenSSH(host, inventory, connect_timeout)
    from skyfab.ssh.fabric import Fabric

    return Fabric(host, inventory, connect_timeout)


__all__ = ["CONNECT_TIMEOUT", "Stream", "Transport", "transport_for"]
