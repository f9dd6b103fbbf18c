"""`attach_device`: a program uses a device that an earlier program has left on a host."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from skyfab._util.suggest import did_you_mean
from skyfab.calls.image import Image
from skyfab.detached.find import attached, runs
from skyfab.device import devices
from skyfab.errors import UsageError
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.pool.compute import Compute
from skyfab.ui import failure
from skyfab.ui.events import Notice

if TYPE_CHECKING:
    import torch


def attach_device(
    name: str,
    hosts: str | Iterable[str | Host] | None = None,
    *,
    inventory: str | os.PathLike[str] | Inventory | None = None,
    **options: Any,
) -> tuple[torch.device, dict[str, Any]]:
    """The device that ``compute.device("cuda", name=name)`` has made in another program, and what is kept on it.

    ``device, kept = sky.attach_device("lab")``: `kept` has what `keep` was given, by name, modules and optimizers as
    their state dicts. One program uses the device at a time: this one waits 15 s for one that has just ended. `hosts`
    and `inventory` are as for `attach`, `options` as for `Compute`. Raises UsageError if there is no such device or
    another program uses it, and HostLost if its host was restarted.
    """
    from skyfab.device import keeping

    failure.install()
    try:
        with attached(name, hosts, inventory=inventory, results="data") as run:  # only a failure is read
            assert run.asker is not None
            host = next(one for one in run.asker.hosts if one.name == run.hosts[0])
    except UsageError as error:
        running = [run.name for run in runs(hosts, inventory=inventory, results="data") if run.state == "running"]
        named = f"these are running: {', '.join(running)}" if running else error.hint
        error.hint = did_you_mean(name, running) or named
        raise
    if run.state == "stopped":
        hint = f'make it again: compute.device(…, name="{name}")'
        raise UsageError(f"the device {name} was stopped", host=host.name, hint=hint)
    if run.state not in ("running", "done"):
        run.result(timeout=0)  # raises the reason: it was lost or has failed
    if run.state != "running":
        raise UsageError(f"{name!r} has ended: {run.last}")
    stream, _ = devices.staying.get(run.id, (None, None))
    if stream is None or stream.is_lost:  # else a cell of a notebook is executed again
        image = Image(python=run.parts[0].about.python)
        pool = Compute([host], inventory=run.inventory, image=image, **options)
        try:
            pool.open()
            if run.phase is not None and run.phase.phase == "in use":
                text = f"{run.last}; waiting 15 s for that program to end"
                pool.events.emit(Notice(host=host.name, text=text))
            stream = pool.join_device(run, seeded=False)
        except BaseException:
            pool.close()
            raise
        atexit.register(pool.close)  # it stays open until then
    return stream.torch_device, keeping.kept(stream)
