"""Gangs: the gang that a pool has now, and which rank sits in which seat."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence

from skyfab.gang import Gang
from skyfab.node import Node
from skyfab.protocol.messages import Done, Port


class Gangs:
    """Keeps one gang for as long as its processes live and the project's code stays the same."""

    def __init__(self, env: Callable[[Node], Mapping[str, str]]) -> None:
        """`env` says what a node's processes find in their environment."""
        self._env = env
        self._gang: Gang | None = None
        self._numbers = itertools.count(1)
        self._ranks: dict[tuple[int, str], int] = {}
        self._lock = threading.Lock()

    def current(self, nodes: Sequence[Node], ranks: Sequence[int], tree: str) -> Gang:
        """The gang for a call, with so many ranks on each node. Raises what is wrong with a node that is lost."""
        with self._lock:
            gang = self._gang
            if gang is not None and not gang.broken and gang.tree == tree:
                return gang
            if gang is not None:
                gang.retire()
            for node in nodes:
                if node.lost is not None:
                    raise node.lost
            answer = nodes[0].session.ask(Port())
            assert isinstance(answer, Done)
            name = f"gang{next(self._numbers)}"
            gang = self._gang = Gang(nodes, ranks, name=name, tree=tree, port=int(answer.text), env=self._env)
            self._ranks.update({(member.node.index, member.seat): member.rank for member in gang.members})
            return gang

    def rank_of(self, node: Node, seat: str) -> int | None:
        """The rank of the process in a seat; None for one that runs solo calls."""
        return self._ranks.get((node.index, seat))

    def vacated(self, node: Node, seat: str) -> None:
        """A seat's process has ended: if it was in the gang, the next call gets a new one."""
        gang = self._gang
        if gang is not None and any(member.node is node and member.seat == seat for member in gang.members):
            gang.broken = True
