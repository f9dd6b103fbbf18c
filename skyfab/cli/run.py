"""`skyfab run`: runs a script, or a function of one, on every rank, as torchrun would."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Annotated

from skyfab.cli.command import Detach, InventoryFile, NamedHosts, Option, Ranks, command
from skyfab.errors import UsageError


@command
def run(
    target: Annotated[str, Option("the script; with a function, that one is called", "FILE.py[:function]")],
    *arguments: Annotated[str, Option("the script's own arguments, or the function's", "[-- ARGUMENTS]")],
    hosts: NamedHosts = None,
    inventory: InventoryFile = None,
    ranks: Ranks = None,
    workdir: Annotated[
        str, Option("where relative paths lead: a folder on the hosts, temp, or auto", "FOLDER")
    ] = "auto",
    detach: Detach = False,
) -> None:
    """Run a script on every rank, as torchrun would.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the like are set, so a script written for torchrun needs no change.
    The modules beside the script travel with it; data does not. Files that it writes stay: on a host in a folder that
    stands for this one, and at the end you are told how to fetch them. --workdir=temp for a folder that goes. Without
    hosts and inventory: two ranks on this machine, in this folder. Ends with 1 when it failed anywhere.

        skyfab run --hosts=node1,node2 train.py -- --epochs 3
        skyfab run --hosts=gpu --ranks=2 experiment.py:main
    """
    from skyfab.calls.call import as_function
    from skyfab.calls.script import perform
    from skyfab.cli.detach_key import broadcast, tell_how_to_attach
    from skyfab.cli.selected import selected
    from skyfab.detached.run import Run
    from skyfab.plugins.base import Torchrun
    from skyfab.pool.compute import Compute

    script, function = _parsed(target)
    found_in, chosen = selected(hosts, inventory)
    if hosts is None and found_in.source is None:
        ranks = ranks or 2
    # Makes the script the main module, so that the modules beside it are sent as its project.
    main = types.ModuleType("__main__")
    main.__file__ = str(script)
    sys.modules["__main__"] = main
    plugins = [Torchrun()]
    with Compute(chosen, inventory=found_in, ranks=ranks or "auto", plugins=plugins, workdir=workdir) as compute:
        started = as_function(perform)
        started.label = target
        call = started(script.name, function, list(arguments))
        found = compute.launch(call) if detach else broadcast(compute, call, name=target)
    if isinstance(found, Run):
        tell_how_to_attach(found)


def _parsed(target: str) -> tuple[Path, str]:
    name, colon, function = target.partition(":")
    script = Path(name).expanduser()
    if not script.is_file():
        why = "is a folder" if script.is_dir() else "there is no such file"
        raise UsageError(f"{name}: {why}", hint="skyfab run --help")
    if script.suffix != ".py":
        raise UsageError(f"{name}: its name does not end in .py", hint="for a command that is no Python: skyfab exec")
    if colon and not function.isidentifier():
        raise UsageError(f"{function!r} names no function", hint=f"skyfab run {name}:main")
    return script.resolve(), function
