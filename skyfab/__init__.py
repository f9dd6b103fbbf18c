"""skyfab: an inventory of machines you already have, plain SSH, and Python functions that run on them.

>>> import skyfab as sky
>>> @sky.function
... def double(x):
...     return 2 * x
>>> with sky.Compute("local", ui="none") as compute:
...     double(21) >> compute
42
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

TYPE_CHECKING = False  # a cold host has no time for `typing`
if TYPE_CHECKING:
    from typing import Any

    from skyfab import device as device
    from skyfab import lab as lab
    from skyfab import plugins as plugins
    from skyfab.calls.call import Call as Call
    from skyfab.calls.call import Function as Function
    from skyfab.calls.call import function as function
    from skyfab.calls.call import gather as gather
    from skyfab.calls.image import Image as Image
    from skyfab.calls.image import PipIndex as PipIndex
    from skyfab.calls.refs import Ref as Ref
    from skyfab.calls.stream import stream as stream
    from skyfab.context import InstanceInfo as InstanceInfo
    from skyfab.context import instance_info as instance_info
    from skyfab.context import shard as shard
    from skyfab.context import silent as silent
    from skyfab.context import stderr as stderr
    from skyfab.context import stdout as stdout
    from skyfab.detached.find import attach as attach
    from skyfab.detached.find import runs as runs
    from skyfab.detached.run import Run as Run
    from skyfab.device.devices import fetch as fetch
    from skyfab.device.devices import keep as keep
    from skyfab.device.devices import load_on as load_on
    from skyfab.device.devices import memory as memory
    from skyfab.device.devices import prefetch as prefetch
    from skyfab.device.devices import remote as remote
    from skyfab.device.devices import run_on as run_on
    from skyfab.device.devices import synchronize as synchronize
    from skyfab.errors import *  # noqa: F403
    from skyfab.host.trial import report as report
    from skyfab.inventory.host import Host as Host
    from skyfab.inventory.inventory import Inventory as Inventory
    from skyfab.pool.attach_device import attach_device as attach_device
    from skyfab.pool.compute import Compute as Compute
    from skyfab.pool.streams import merge as merge
    from skyfab.providers.container import Container as Container
    from skyfab.providers.vagrant import Vagrant as Vagrant

_ERRORS = """
    ActorLost AuthenticationRefused BroadcastError CallCancelled CallError CallTimeout DeviceError HostError
    HostKeyRefused HostLost HostUnfit InventoryError NotPicklable PeersUnreachable PoolError ProtocolError RemoteError
    RemoteTraceback SkyfabError UnknownHost Unreachable UntrustedResult UsageError WorkerDied
"""
_HOMES = {
    "errors": tuple(_ERRORS.split()),
    "pool.attach_device": ("attach_device",),
    "pool.compute": ("Compute",),
    "device.devices": ("fetch", "keep", "load_on", "memory", "prefetch", "remote", "run_on", "synchronize"),
    "detached.find": ("attach", "runs"),
    "detached.run": ("Run",),
    "host.trial": ("report",),
    "context": ("InstanceInfo", "instance_info", "shard", "silent", "stderr", "stdout"),
    "calls.call": ("Call", "Function", "function", "gather"),
    "calls.image": ("Image", "PipIndex"),
    "inventory.host": ("Host",),
    "inventory.inventory": ("Inventory",),
    "calls.refs": ("Ref",),
    "calls.stream": ("stream",),
    "pool.streams": ("merge",),
    "providers.container": ("Container",),
    "providers.vagrant": ("Vagrant",),
}
_MODULES = ("device", "lab", "plugins")
_OF_SKYWARD = {
    **dict.fromkeys(("AWS", "GCP", "RunPod", "VastAI", "Verda"), "name your own machines: Compute(hosts=…)"),
    "Options": "its fields are arguments of Compute",
    "Volume": "use a path on the hosts, and compute.upload(…)",
    "Worker": "Compute(slots=N)",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [*sorted(_HOME)]  # noqa: PLE0604  # made from the table above, and pinned by a test


def __getattr__(name: str) -> Any:
    """Loads a name when it is asked for: a host imports skyfab with the standard library alone."""
    if name in _HOME:
        value = getattr(importlib.import_module(f"skyfab.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"skyfab.{name}")
    hint = f" (hint: {_OF_SKYWARD[name]})" if name in _OF_SKYWARD else ""
    raise AttributeError(f"module 'skyfab' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, *_MODULES])
