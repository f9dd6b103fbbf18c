"""`skyfab trust`: records the keys of hosts that ssh does not know yet."""

from __future__ import annotations

from typing import Annotated

from skyfab.cli.command import HOSTS, InventoryFile, Option, command
from skyfab.errors import UsageError


@command
def trust(
    hosts: Annotated[
        str | None, Option(HOSTS, "HOSTS", default="all of the inventory", plain=True, joined=True)
    ] = None,
    inventory: InventoryFile = None,
    known_hosts: Annotated[
        str | None, Option("the file to record them in", "FILE", default="the one that ssh uses")
    ] = None,
    replace: Annotated[bool, Option("replace a recorded key that differs")] = False,
    yes: Annotated[bool, Option("do not ask")] = False,
) -> int:
    """Record the keys of hosts that ssh does not know yet.

    Shows their fingerprints first. Compare them with what ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub prints on
    the console of the host. Exits with 1 if you decline.

        skyfab trust node1
        skyfab trust --hosts=node1,node2 --replace
    """
    from skyfab.cli.host_keys import record
    from skyfab.cli.host_selection import selected

    _, chosen = selected(hosts, inventory)
    remote = [host for host in chosen if host.transport != "local"]
    if not remote:
        raise UsageError("only this machine is selected, and it has no host key", hint="name another host")
    return 0 if record(remote, known_hosts=known_hosts, replace=replace, yes=yes) else 1
