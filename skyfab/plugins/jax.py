"""Plugin for JAX: initializes one distributed runtime over all ranks, so that every rank sees the devices of all."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skyfab import context
from skyfab.plugins.base import RENDEZVOUS, Plugin
from skyfab.plugins.packages import with_packages

if TYPE_CHECKING:
    from skyfab.calls.image import Image
    from skyfab.context import InstanceInfo
    from skyfab.inventory.host import Host

TIMEOUT: Final = 60
"""Timeout in seconds for all ranks to connect, once they have imported jax."""

_failed = False
"""A call has failed in this process. The other ranks are stopped, and would not take part in a shutdown."""


@dataclass(frozen=True)
class Jax(Plugin):
    """JAX on every host, initialized over all ranks of ``@``: ``jax.devices()`` are those of all hosts.

    `extra` is the build, as in ``jax[cuda12]``; without it, for CPUs. Cannot be combined with `plugins.torch` in one
    pool: both need the head's port.
    """

    """Made by `jax`, which documents the field."""

    network = "needed"
    exclusive = RENDEZVOUS
    extra: str | None = None

    def transform(self, image: Image, host: Host) -> Image:
        return with_packages(image, host, f"jax[{self.extra}]" if self.extra else "jax")

    @contextmanager
    def around_process(self, info: InstanceInfo) -> Iterator[None]:
        if info.world_size < 2:
            yield
            return
        os.environ.setdefault("JAX_ENABLE_PREEMPTION_SERVICE", "false")  # else SIGTERM would not terminate a rank
        import jax

        _choose_interface(info)
        context.close_listener()  # jax listens there itself, on the head; the others retry until it does
        address = f"[{info.head_addr}]" if ":" in info.head_addr else info.head_addr
        jax.distributed.initialize(
            coordinator_address=f"{address}:{info.head_port}",
            num_processes=info.world_size,
            process_id=info.rank,
            local_device_ids=_own_devices(info),
            cluster_detection_method="deactivate",  # all is given: ignore Slurm's variables
            initialization_timeout=TIMEOUT,
        )
        try:
            yield
        finally:
            if not _failed:
                jax.distributed.shutdown()

    @contextmanager
    def around_call(self, info: InstanceInfo) -> Iterator[None]:
        global _failed
        try:
            yield
        except BaseException:
            _failed = True
            raise


def _choose_interface(info: InstanceInfo) -> None:
    """Makes traffic between CPUs (gloo) use the interface to the other hosts.

    The default is the address of the host's own name: on Debian that is loopback, elsewhere often unresolvable. jax has
    no setting for it, only jaxlib. If a version of jaxlib does not have it in this place, nothing is changed.
    """
    try:
        from jaxlib import _jax

        make = _jax.make_gloo_tcp_collectives
    except (ImportError, AttributeError):
        return
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface:
        _jax.make_gloo_tcp_collectives = functools.partial(make, interface=interface)
    elif set(info.peers) == {info.head_addr}:  # all ranks are on one machine
        _jax.make_gloo_tcp_collectives = functools.partial(make, hostname=info.head_addr)


def _own_devices(info: InstanceInfo) -> list[int] | None:
    """One GPU for each rank of a host; all of them for its only rank."""
    if not info.accelerators or info.local_world_size == 1:
        return None
    return [info.local_rank % info.accelerators]
