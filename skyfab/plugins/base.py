"""What a plugin is: hooks around an environment, a process, a call and a pool. Each does nothing until it is written.

A plugin travels to the hosts by pickle, and runs there in each process before the first function does::

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

from skyfab.errors import UsageError

if TYPE_CHECKING:
    from skyfab.calls.call import Pool
    from skyfab.calls.image import Image
    from skyfab.context import InstanceInfo
    from skyfab.inventory.host import Host

RENDEZVOUS: Final = "the port at which the ranks meet"
"""What frameworks with a process group of their own take."""


Network = Literal["unused", "wanted", "needed"]


@dataclass(frozen=True, slots=True)
class Elastic:
    """A gang that goes on without the hosts that it loses."""

    min_hosts: int
    max_hosts: int
    """Hosts."""
    max_restarts: int
    """How often its ranks are started again after a failure."""
    secret: bytes = field(default_factory=partial(os.urandom, 32), repr=False, compare=False)
    """Known to the processes of its gangs alone: they travel with it, inside the connections to their hosts."""


class Plugin:
    """Derive from this and write the hooks that you need."""

    exclusive: ClassVar[str] = ""
    """What it takes for itself, in words: of the plugins of a pool, one may have it."""
    elastic: Elastic | None = None
    """Where it is set, each host has one process that starts the host's ranks: see `run_elastic_agent`."""
    network: Network = "unused"
    """Whether the ranks of ``@`` connect to each other. Where it is "needed", hosts that cannot are an error at once.

    Where it is "wanted", a line says so, and the call goes on.
    """

    def transform(self, image: Image, host: Host) -> Image:
        """What the image must be on a host. Here, before anything is reached."""
        return image

    @contextmanager
    def around_process(self, info: InstanceInfo) -> Iterator[None]:
        """In each process on a host, from before its first call to its end."""
        yield

    @contextmanager
    def around_call(self, info: InstanceInfo) -> Iterator[None]:
        """In the process, around each call."""
        yield

    def run_elastic_agent(self, info: InstanceInfo, work: tuple[Any, ...]) -> list[tuple[int, Any]]:
        """In an elastic gang's process on a host: runs the work in ranks of its own; returns ranks and results."""
        raise NotImplementedError

    @contextmanager
    def around_client(self, compute: Pool) -> Iterator[None]:
        """Here, while the pool is open."""
        yield


class Torchrun(Plugin):
    """Scripts that were written for torchrun: some connect to MASTER_ADDR, some do not."""

    network = "wanted"


def check_together(plugins: Sequence[Plugin]) -> None:
    """Raises UsageError for plugins that cannot be in one pool."""
    owners: dict[str, Plugin] = {}
    for plugin in plugins:
        if not plugin.exclusive:
            continue
        if plugin.exclusive in owners:
            names = [f"plugins.{type(one).__name__.lower()}" for one in (owners[plugin.exclusive], plugin)]
            raise UsageError(
                f"{' and '.join(names)} cannot be in one pool: each needs {plugin.exclusive} for itself",
                hint="leave one of them out, or open a pool for each",
            )
        owners[plugin.exclusive] = plugin
