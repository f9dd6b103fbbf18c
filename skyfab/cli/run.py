"""`skyfab run`: runs a script, or a function of one, on every rank, as torchrun would."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from pathlib import Path

from skyfab.calls.call import as_function
from skyfab.calls.script import perform
from skyfab.cli.detach_key import broadcast, tell_how_to_attach
from skyfab.detached.run import Run
from skyfab.errors import UsageError
from skyfab.plugins.base import Torchrun
from skyfab.pool.compute import Compute


def run(
    target: str,
    arguments: Sequence[str],
    hosts: str | None,
    inventory: str | None,
    *,
    ranks: int | None,
    workdir: str,
    detach: bool,
) -> None:
    """Runs FILE.py or FILE.py:function on every rank of the hosts, or on two ranks of this machine."""
    script, function = _parsed(target)
    if hosts is None and inventory is None:
        hosts, ranks = "local", ranks or 2
    # Makes the script the main module, so that the modules beside it are sent as its project.
    main = types.ModuleType("__main__")
    main.__file__ = str(script)
    sys.modules["__main__"] = main
    plugins = [Torchrun()]
    with Compute(hosts, inventory=inventory, ranks=ranks or "auto", plugins=plugins, workdir=workdir) as compute:
        started = as_function(perform)
        started.label = target
        call = started(script.name, function, list(arguments))
        found = compute.launch(call) if detach else broadcast(compute, call, name=target)
    if isinstance(found, Run):
        tell_how_to_attach(found)


def _parsed(target: str) -> tuple[Path, str]:
    name, colon, function = target.partition(":")
    script = Path(name).expanduser()
    if not script.is_file() or script.suffix != ".py":
        raise UsageError(f"{name} is no Python file", hint="skyfab run FILE.py[:function] -- ARGUMENTS")
    if colon and not function.isidentifier():
        raise UsageError(f"{function!r} names no function", hint=f"skyfab run {name}:main")
    return script.resolve(), function
