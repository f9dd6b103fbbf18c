"""The broadcasts of a pool: on which ranks they run, and how often they are started again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from skyfab.calls.call import Function
from skyfab.calls.pack import PackedFunction
from skyfab.calls.results import in_order
from skyfab.plugins.base import Elastic
from skyfab.pool.broadcast import Broadcast, BroadcastQueue, GangCall, may_go_on, retry
from skyfab.pool.futures import CallFuture
from skyfab.pool.gang import GangCache, GangSpec, remaining
from skyfab.pool.node import Node
from skyfab.pool.stall import watch
from skyfab.protocol import codec
from skyfab.session.sigint import SIGINT_GUARD
from skyfab.ui.events import Events


class Broadcasts(BroadcastQueue):
    """The queue of a pool's broadcasts, and the gangs that they run in."""

    def __init__(
        self,
        cache: GangCache,
        ranks: int | Literal["auto"],
        elastic: Elastic | None,
        events: Events,
        *,
        untrusted: bool,
    ) -> None:
        super().__init__()
        self._cache = cache
        self._ranks = ranks
        self._elastic = elastic
        self._events = events
        self._untrusted = untrusted

    def ranks_on(self, node: Node) -> int:
        return self._ranks if self._ranks != "auto" else max(1, len(node.gpus))

    def available(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """Those that a broadcast runs on now. Raises HostLost if they are too few for an elastic gang."""
        return nodes if self._elastic is None else remaining(nodes, self._elastic)

    def spec(self, nodes: Sequence[Node], ranks: Iterable[int], tree: str, attempt: int = 0) -> GangSpec:
        elastic = self._elastic is not None
        return GangSpec(nodes=tuple(nodes), ranks=tuple(ranks), tree=tree, attempt=attempt, elastic_agents=elastic)

    def submit(
        self,
        about: Function[..., Any],
        packed: tuple[PackedFunction, codec.Payload, str],
        nodes: Sequence[Node],
        *,
        timeout: float | None,
        pool: object,
    ) -> CallFuture:
        """Runs a call on the ranks of the available nodes. `packed`: the function, its arguments and the tree."""
        elastic, retries = self._elastic, about.retries
        function, arguments, tree = packed
        broadcast = Broadcast(
            function=function,
            arguments=arguments,
            label=about.label,
            timeout=timeout,
            min_hosts=None if elastic is None else elastic.min_hosts,
            untrusted=self._untrusted,
        )
        jobs: list[str] = []

        def start(attempt: int) -> CallFuture:
            begun = self.add(broadcast, lambda call: self._begin_on(call, nodes, tree, attempt, jobs))
            begun.future.pool = pool
            watch(begun.future, begun.places, about, self._events)
            return begun.future

        if elastic is not None:
            return retry(start, lambda error, number: may_go_on(error, number, elastic, retries), in_order)
        return retry(start, lambda _, number: number < retries) if retries else start(0)

    def _begin_on(self, call: GangCall, nodes: Sequence[Node], tree: str, attempt: int, jobs: list[str]) -> None:
        """Sends a broadcast to the ranks of the available hosts. Raises their errors.

        `jobs` keeps the job's name across attempts, so that a retry finds what an earlier attempt saved under it.
        """
        nodes = self.available(nodes)
        spec = self.spec(nodes, map(self.ranks_on, nodes), tree, attempt)
        gang = self._cache.current(spec, job=jobs[0] if jobs else None)
        jobs.append(gang.job)
        with SIGINT_GUARD:
            call.begin(gang, self._events.call(call.broadcast.label, *(node.name for node in nodes), ranks=spec.ranks))
