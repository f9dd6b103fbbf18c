"""Temporary SSH hosts for tests and trials: node1, node2 …, each with its own files, address, users and host key.

::

    from skyfab.lab import Lab

    with Lab.start(count=2) as lab:
        lab.inventory                      # the path of an inventory.toml
        lab.hosts[0].run(["hostname"])     # without SSH
        lab.hosts[1].cut()                 # disconnect its network

On Linux, the hosts are namespaces: root's, or those of an ordinary user in a user namespace. Elsewhere they are sshd
processes on high ports of 127.0.0.1, and `lab.limits` lists what cannot be tested with these. `Lab.start` has an
argument for each kind of host: without Python, with two networks, behind forwarded ports … (docs/lab.md).
"""

from __future__ import annotations

from .host import LabHost
from .lab import Lab
from .persistent import down, status, up
from .process import LabProcess

__all__ = ["Lab", "LabHost", "LabProcess", "down", "status", "up"]
