"""`Plugin`: the base class of plugins, with hooks for the image, a worker process, a call and a pool.

The hooks do nothing unless they are overridden. A plugin is pickled and sent to the hosts, and runs there in each
process before the first function does::

    class Seeded(sky.plugins.Plugin):
        def __init__(self, seed):
            self.seed = seed

        @contextmanager
        def around_call(self, info):
            random.seed(self.seed + info.rank)
            yield
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from skyfab import context
from skyfab.errors import UsageError

if TYPE_CHECKING:
    from skyfab.calls.call import Pool
    from skyfab.calls.image import Image
    from skyfab.context import InstanceInfo
    from skyfab.inventory.host import Host

RENDEZVOUS: Final = "the rendezvous port"
"""The resource that frameworks with a process group of their own need exclusively."""


Network = Literal["unused", "wanted", "needed"]


@dataclass(frozen=True, slots=True)
class Elastic:
    """Settings of a gang that continues without lost hosts."""

    min_hosts: int
    max_hosts: int
    """Limits of the number of hosts."""
    max_restarts: int
    """How often its ranks are restarted after a failure."""
    secret: bytes = field(default_factory=partial(os.urandom, 32), repr=False, compare=False)
    """Shared by the processes of its gangs only. Sent to them inside the connections to their hosts."""


class Plugin:
    """Base class: override the hooks that you need."""

    exclusive: ClassVar[str] = ""
    """A resource, described in words, that only one plugin of a pool may use."""
    elastic: Elastic | None = None
    """If set, each host has one worker that starts the host's ranks: see `run_elastic_agent`."""
    network: Network = "unused"
    """Whether the ranks of ``@`` connect to each other. If "needed", hosts that cannot connect are an error at once.

    If "wanted", a notice is shown and the call continues.
    """

    def transform(self, image: Image, host: Host) -> Image:
        """Returns the image for `host`, changed from `image`. Runs on this machine, before connecting."""
        return image

    @contextmanager
    def around_process(self, info: InstanceInfo) -> Iterator[None]:
        """Runs in each worker on a host, which `info` describes, from before the program is imported until it exits."""
        yield

    @contextmanager
    def around_call(self, info: InstanceInfo) -> Iterator[None]:
        """Runs in the worker, which `info` describes, around each call."""
        yield

    def run_elastic_agent(self, info: InstanceInfo, work: tuple[Any, ...]) -> list[tuple[int, Any]]:
        """Runs `work` in the ranks of an elastic gang on the host of `info`; returns pairs of rank and result."""
        raise NotImplementedError

    @contextmanager
    def around_client(self, compute: Pool) -> Iterator[None]:
        """Runs on this machine, while the pool `compute` is open."""
        yield


class Torchrun(Plugin):
    """For scripts that were written for torchrun: some connect to MASTER_ADDR, some do not."""

    network = "wanted"


class OwnPort(Plugin):
    """For calls whose ranks talk to rank 0 (skyfab.host.rank_channel): `context.take_listener` works during the call.

    Other functions can listen at the rendezvous port themselves: the socket that reserved it is closed before.
    """

    network = "needed"
    exclusive = RENDEZVOUS

    @contextmanager
    def around_process(self, info: InstanceInfo) -> Iterator[None]:
        self._listener = context.take_listener()
        yield

    @contextmanager
    def around_call(self, info: InstanceInfo) -> Iterator[None]:
        context.hold_listener(self._listener)
        yield


def check_together(plugins: Sequence[Plugin]) -> None:
    """Raises UsageError for plugins that cannot be used in the same pool, and for other objects."""
    owners: dict[str, Plugin] = {}
    for plugin in plugins:
        if not isinstance(plugin, Plugin):
            raise UsageError(f"not a plugin: {plugin!r}", hint="for example, plugins=[sky.plugins.torch()]")
        if not plugin.exclusive:
            continue
        if plugin.exclusive in owners:
            names = [f"plugins.{type(one).__name__.lower()}" for one in (owners[plugin.exclusive], plugin)]
            raise UsageError(
                f"{' and '.join(names)} do not work in one pool: each needs {plugin.exclusive} for itself",
                hint="omit one of them, or open a pool for each",
            )
        owners[plugin.exclusive] = plugin
