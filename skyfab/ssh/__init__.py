"""Transports: a byte stream to a process on a host, over the ssh program, Fabric, or a local process."""

from __future__ import annotations

import shutil

from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.ssh.base import Stream, Transport
from skyfab.ssh.local import Local
from skyfab.ssh.openssh import OpenSSH


def transport_for(host: Host, inventory: Inventory) -> Transport:
    """The transport that the host is configured with; `auto` is the ssh program if it is installed, else Fabric."""
    kind = host.transport
    if kind == "auto":
        kind = "openssh" if shutil.which("ssh") else "fabric"
    if kind == "local":
        return Local(host)
    if kind == "openssh":
        return OpenSSH(host, inventory)
    from skyfab.ssh.fabric import Fabric

    return Fabric(host, inventory)


__all__ = ["Stream", "Transport", "transport_for"]
