"""Relays of packages to hosts that have no environment yet, by separate agents that run on any Python of the host."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

from skyfab.env.share import LEAST, Delivery, Sharing
from skyfab.inventory.host import Host
from skyfab.pool.node import Node
from skyfab.pool.nodes import Nodes
from skyfab.pool.relay import Relay, is_worth
from skyfab.session.fanout import Raised, for_each_host, meanwhile

_PATIENCE: Final = 10.0
"""Seconds for a host's agent to start or reconnect before the others begin without it."""
_LOOK: Final = 0.5
"""Seconds between checks of whether the packages are still wanted."""


def deliver(nodes: Nodes, relay: Relay, deliveries: Sequence[Delivery], sharing: Sharing) -> None:
    """Puts files into the stores of hosts. A host that fails continues without them."""
    left = Counter(host for each in deliveries for host in each.hosts)

    def done(host: Host) -> None:
        left[host] -= 1
        if not left[host]:
            sharing.settle(host)

    def send(delivery: Delivery) -> None:
        targets = [node for node in opened if node.host in delivery.hosts]
        if not is_worth(LEAST, targets):
            targets = []
        for host in set(delivery.hosts) - {node.host for node in targets}:
            done(host)
        relay.send(
            delivery.files,
            targets,
            keep=True,
            progress=lambda node, done, total: sharing.moved(node.host, done, total),
            done=lambda node, error: done(node.host),
        )

    helpers = nodes.helpers([*left], _PATIENCE)
    is_over = threading.Event()

    def close() -> None:
        while not is_over.wait(_LOOK) and not sharing.is_abandoned:
            pass
        for_each_host(Node.close, helpers)

    until = time.monotonic() + _PATIENCE
    outcomes = for_each_host(
        lambda node: node.session.open(), helpers, lambda: sharing.is_abandoned or time.monotonic() > until
    )
    opened = [node for node, outcome in zip(helpers, outcomes, strict=True) if not isinstance(outcome, Raised)]
    with meanwhile(close):
        try:
            for_each_host(send, deliveries)
        finally:
            is_over.set()
