"""Elastic gangs, as their pool sees them. Torch starts the ranks again when one fails; here is what it cannot do.

The rendezvous is at the head: when that host is lost, the whole gang begins anew on those that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyfab.errors import BroadcastError, HostLost
from skyfab.plugins.base import Elastic
from skyfab.pool.node import Node


def remaining(nodes: Sequence[Node], elastic: Elastic) -> list[Node]:
    """The nodes that a gang may have now. Raises HostLost when they are too few."""
    found = [node for node in nodes if node.lost is None]
    if len(found) < elastic.least:
        raise HostLost(
            f"{len(found)} of {len(nodes)} hosts are left, and elastic={elastic.least, elastic.most} needs"
            f" {elastic.least} at least"
        )
    return found[: elastic.most]


def may_go_on(error: BaseException, number: int, elastic: Elastic, retries: int) -> bool:
    """Whether a gang that failed is started again: the user said so, or a lost host is the reason."""
    if number < retries:
        return True
    lost = isinstance(error, BroadcastError) and any(isinstance(one, HostLost) for one in error.exceptions)
    return lost and number < retries + elastic.max_restarts


def in_order(found: Sequence[list[tuple[int, Any]] | None]) -> list[Any]:
    """The results of all ranks in the order of their last attempt; hosts that were left out have none."""
    return [value for _, value in sorted((pair for part in found if part for pair in part), key=lambda pair: pair[0])]
