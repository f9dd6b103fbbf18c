"""Gangs: the gang that a pool has now, and which rank sits in which seat."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from skyfab.dispatch import CallFuture
from skyfab.errors import ProtocolError
from skyfab.gang import Gang
from skyfab.meeting import Meetings
from skyfab.node import Node


class Gangs:
    """Keeps one gang for as long as its processes live and the project's code stays the same."""

    def __init__(self, env: Callable[[Node], Mapping[str, str]], pool: Callable[[], str], meetings: Meetings) -> None:
        """`env` says what a node's processes find in their environment; `pool`, a name that no other pool has."""
        self._env = env
        self._pool = pool
        self._meetings = meetings
        self._gang: Gang | None = None
        self._numbers = itertools.count(1)
        self._ranks: dict[tuple[int, str], int] = {}
        self._job = ""
        self._lock = threading.Lock()

    def current(
        self, nodes: Sequence[Node], ranks: Sequence[int], tree: str, *, attempt: int = 0, conducted: bool = False
    ) -> Gang:
        """The gang for a call, with so many ranks on each node. Raises what is wrong with a node that is lost.

        What is tried again gets a new one. Where it is `conducted`, each node has one process that starts the ranks.
        """
        with self._lock:
            gang = self._gang
            wanted = (tree, attempt, list(nodes))
            if gang is not None and not gang.broken and (gang.tree, gang.attempt, gang.nodes) == wanted:
                return gang
            if gang is not None:
                gang.retire()
            for node in nodes:
                if node.lost is not None:
                    raise node.lost
            meeting = self._meetings.arrange(nodes)
            number = next(self._numbers)
            if not attempt:  # what is tried again is the same job, and finds what it has saved under that name
                self._job = f"{self._pool()}-{number}"
            gang = Gang(
                nodes,
                ranks,
                name=f"gang{number}",
                job=self._job,
                tree=tree,
                meeting=meeting,
                attempt=attempt,
                env=self._env,
                conducted=conducted,
            )
            self._gang = gang
            if not conducted:  # else a seat has several, and which ones may change
                self._ranks.update({(member.node.index, member.seat): member.rank for member in gang.members})
            return gang

    def at_work(self) -> Gang | None:
        """The gang, while a call of it is under way."""
        gang = self._gang
        return gang if gang is not None and gang.rounds and not gang.broken else None

    def rank_of(self, node: Node, seat: str) -> int | None:
        """The rank of the process in a seat; None for one that runs solo calls."""
        return self._ranks.get((node.index, seat))

    def vacated(self, node: Node, seat: str) -> None:
        """A seat's process has ended: if it was in the gang, the next call gets a new one."""
        gang = self._gang
        if gang is not None and any(member.node is node and member.seat == seat for member in gang.members):
            gang.broken = True


def insist(
    start: Callable[[int], CallFuture],
    again: Callable[[BaseException, int], bool],
    finish: Callable[[Any], Any] = lambda result: result,
) -> CallFuture:
    """Starts a call, and again where `again` says so of its failure; both are told how often it was started before."""
    outer = CallFuture()

    def attempt(number: int) -> None:
        try:
            inner = start(number)
        except BaseException as error:
            outer.settle(None, error)
            return
        outer.node, outer.on_cancel = inner.node, inner.cancel
        Future.add_done_callback(inner, lambda _: done(inner, number))

    def done(inner: CallFuture, number: int) -> None:
        if inner.cancelled():
            outer.cancel()
            return
        error = inner.exception()
        if error is None:
            try:
                found = finish(inner.result())
            except Exception as trouble:
                outer.settle(None, ProtocolError(f"no results that could be: {trouble}"))
            else:
                outer.settle(found)
        elif not outer.done() and again(error, number):  # not on the thread that reads: a new gang must be asked for
            threading.Thread(target=attempt, args=(number + 1,), daemon=True).start()
        else:
            outer.settle(None, error)

    attempt(0)
    return outer
