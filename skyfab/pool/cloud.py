"""Helpful errors for `Compute` parameters that only make sense for cloud machines (instance type, region, GPUs …)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, ParamSpec

from skyfab.errors import UsageError

P = ParamSpec("P")

_SIZES: Final = "name hosts that have it: Compute(hosts=…) takes names, groups and tags of inventory.toml"
_PLACES: Final = "the machines are your own: list them in inventory.toml, and choose some with Compute(hosts=…)"
_INSTEAD: Final = {
    **dict.fromkeys(("accelerator", "accelerators", "gpu", "gpus", "vcpus", "cpus", "cpu"), _SIZES),
    **dict.fromkeys(("memory", "memory_gb", "disk", "disk_gb", "architecture", "instance_type"), _SIZES),
    **dict.fromkeys(("cloud", "region", "zone", "spot", "allocation", "max_hourly_cost", "ttl"), _PLACES),
}


def refuses_rent(init: Callable[P, None]) -> Callable[P, None]:
    """Makes a constructor raise a UsageError for cloud parameters, with a hint about what to write instead.

    Other unknown names raise Python's TypeError. Type checkers see the constructor's own signature.
    """

    @functools.wraps(init)
    def checked(*args: P.args, **options: P.kwargs) -> None:
        for name in options:
            if name in _INSTEAD and name not in known:
                raise UsageError(f"Compute({name}=…) rents no machines", hint=_INSTEAD[name])
        init(*args, **options)

    known = init.__code__.co_varnames[: init.__code__.co_argcount + init.__code__.co_kwonlyargcount]
    return checked
