"""Relays of packages to hosts that have no environment yet, by separate agents that run on any Python of the host."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from skyfab.env.share import LEAST, Delivery, Sharing
from skyfab.inventory.host import Host
from skyfab.pool.node import Node
from skyfab.pool.nodes import Nodes
from skyfab.pool.relay import Relay, is_worth
from skyfab.session.fanout import Raised, for_each_host

_PATIENCE: Final = 10.0
"""Seconds for a host's agent to start or reconnect before the others begin without it."""
_LOOK: Final = 0.5
"""Seconds between checks of whether the packages are still wanted."""


class PackageRelay:
    """Has hosts that lack the same packages pass them on to each other before they have an environment."""

    def __init__(self, nodes: Nodes, relay: Relay) -> None:
        self._nodes = nodes
        self._relay = relay

    def deliver(self, deliveries: Sequence[Delivery], sharing: Sharing) -> None:
        """Puts files into the stores of hosts. A host that fails continues without them."""
        left = Counter(host.name for each in deliveries for host in each.hosts)

        def done(host: Host) -> None:
            left[host.name] -= 1
            if not left[host.name]:
                sharing.settle(host)

        def send(delivery: Delivery) -> None:
            targets = [node for node in nodes if node.host in delivery.hosts]
            if not is_worth(LEAST, targets):
                targets = []
            for host in set(delivery.hosts) - {node.host for node in targets}:
                done(host)
            self._relay.send(
                delivery.files,
                targets,
                keep=True,
                progress=lambda node, done, total: sharing.moved(node.host, done, total),
                done=lambda node, error: done(node.host),
            )

        with self._open([*{host.name: host for each in deliveries for host in each.hosts}.values()], sharing) as nodes:
            for_each_host(send, deliveries)

    @contextmanager
    def _open(self, hosts: Sequence[Host], sharing: Sharing) -> Iterator[list[Node]]:
        """Nodes of the hosts that can be reached in time. They are closed at the end, or when no host waits."""
        nodes = self._nodes.helpers(hosts, _PATIENCE)
        until = time.monotonic() + _PATIENCE
        is_over = threading.Event()

        def open_one(node: Node) -> None:
            node.session.open()

        def close() -> None:
            while not is_over.wait(_LOOK) and not sharing.is_abandoned:
                pass
            for_each_host(Node.close, nodes)

        opened = for_each_host(open_one, nodes, lambda: sharing.is_abandoned or time.monotonic() > until)
        closing = threading.Thread(target=close, daemon=True)
        closing.start()
        try:
            yield [node for node, outcome in zip(nodes, opened, strict=True) if not isinstance(outcome, Raised)]
        finally:
            is_over.set()
            closing.join()
