"""`skyfab trust`: records the keys of hosts that ssh does not know yet."""

from __future__ import annotations

from typing import Annotated

from skyfab.cli.command import Hosts, InventoryFile, Option, command
from skyfab.errors import UsageError


@command
def trust(
    hosts: Hosts = None,
    inventory: InventoryFile = None,
    known_hosts: Annotated[str | None, Option("the file to record them in; else the one that ssh uses", "FILE")] = None,
    replace: Annotated[bool, Option("put the new key in the place of another one on record")] = False,
    yes: Annotated[bool, Option("do not ask")] = False,
) -> int:
    """Record the keys of hosts that ssh does not know yet.

    Shows their fingerprints first. Compare them with what the host itself says, on its own screen, to ssh-keygen -lf
    /etc/ssh/ssh_host_ed25519_key.pub. Ends with 1 when you do not agree.

        skyfab trust node1
        skyfab trust --hosts=node1,node2 --replace
    """
    from skyfab.cli.host_keys import record
    from skyfab.cli.host_selection import selected

    _, chosen = selected(hosts, inventory)
    remote = [host for host in chosen if host.transport != "local"]
    if not remote:
        raise UsageError("only this machine is selected: it needs no host key", hint="name another host")
    return 0 if record(remote, known_hosts=known_hosts, replace=replace, yes=yes) else 1
