"""Relays of packages to hosts that have no environment yet: by agents of their own, which run any Python of the host."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from skyfab.pool.addresses import machine_of
from skyfab.session.fanout import Raised, for_each_host

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skyfab.env.share import Delivery
    from skyfab.inventory.host import Host
    from skyfab.pool.node import Node
    from skyfab.pool.nodes import Nodes
    from skyfab.pool.relay import Relay

_PATIENCE: Final = 10.0
"""Seconds for a host's agent to start, before the others begin without it."""
_LOOK: Final = 0.5
"""Seconds between checks of whether the packages are still wanted."""


class PackageRelay:
    """Has hosts that lack the same packages pass them on to each other, before they have an environment."""

    def __init__(self, nodes: Nodes, relay: Relay) -> None:
        self._nodes = nodes
        self._relay = relay

    def deliver(
        self,
        deliveries: Sequence[Delivery],
        progress: Callable[[Host, int, int], None],
        stopped: Callable[[], bool],
    ) -> None:
        """Puts files into the stores of hosts. Hosts that fail do not get them: see env/share.py."""
        hosts = [*dict.fromkeys(host for each in deliveries for host in each.hosts)]
        with self._open(hosts, stopped) as nodes:
            for each in deliveries:
                targets = [node for node in nodes if node.host in each.hosts]
                if len({machine_of(node) for node in targets}) > 1:
                    self._relay.send(
                        each.files,
                        targets,
                        keep=True,
                        progress=lambda node, done, total: progress(node.host, done, total),
                    )

    @contextmanager
    def _open(self, hosts: Sequence[Host], stopped: Callable[[], bool]) -> Iterator[list[Node]]:
        """Nodes of those hosts that can be reached in time. They are closed at the end, or once `stopped`."""
        nodes = self._nodes.helpers(hosts)
        until = time.monotonic() + _PATIENCE
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(_LOOK) and not stopped():
                pass
            for_each_host(lambda node: node.close(), nodes)

        def is_late() -> bool:
            return stopped() or time.monotonic() > until

        opened = for_each_host(lambda node: node.session.open(), nodes, is_late)
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield [node for node, outcome in zip(nodes, opened, strict=True) if not isinstance(outcome, Raised)]
        finally:
            is_over.set()
            watcher.join()
