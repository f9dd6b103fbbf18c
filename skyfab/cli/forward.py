"""`skyfab forward`: forwards ports of a host to this machine."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Annotated

from skyfab.cli.command import InventoryFile, OneHost, Option, command
from skyfab.errors import UsageError


@command
def forward(
    port: Annotated[
        str, Option("a port of the host, or name:port as the host sees it; separate several with commas", "PORT")
    ],
    host: OneHost = None,
    inventory: InventoryFile = None,
    local: Annotated[
        int | None,
        Option("the port on this machine; 0 for any", "PORT", least=0, default="the same one if it is free, else any"),
    ] = None,
) -> int:
    """Forward a port of a host to 127.0.0.1, until Ctrl-C.

    For TensorBoard or a notebook on the host. If the SSH connection breaks, open connections end, and new ones work
    once it is back. Other users of this machine can connect too.

        skyfab forward 6006 --host=node1
        skyfab forward 6006,8888 --host=node1
        skyfab forward 8888 --host=node1 --local=9999
    """
    from skyfab._util.signals import NAP
    from skyfab.cli.host_selection import selected_one
    from skyfab.pool.forward import Forwards
    from skyfab.ui.events import Events

    ports = port.split(",")
    if local is not None and len(ports) > 1:
        raise UsageError("--local takes one port", hint=f"use one command for each of {' and '.join(ports)}")
    found, chosen = selected_one(host, inventory)
    events = Events()
    events.subscribe(lambda event: print(event, file=sys.stderr, flush=True))
    with contextlib.closing(Forwards(events)) as forwards:
        for one in [forwards.open(chosen, found, one, local) for one in ports]:
            print(f"{one.url} → {one.to}", flush=True)
        try:
            while True:
                time.sleep(NAP)
        except KeyboardInterrupt:
            if sys.stderr.isatty():
                print(file=sys.stderr)  # after the ^C that the terminal shows
    return 130
