"""Detached runs: starts a call on agents of its own, or takes over a running broadcast, and disconnects from them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from skyfab.calls.pack import PackedFunction
from skyfab.calls.project import Tree
from skyfab.errors import CallCancelled, SkyfabError
from skyfab.pool.broadcast import Broadcast, GangCall
from skyfab.pool.gang import Gang
from skyfab.pool.node import Node, WorkerSpec
from skyfab.pool.nodes import close_all, open_all
from skyfab.protocol import codec, messages
from skyfab.ui.events import Events


class Detacher:
    """Starts one detached run on its hosts."""

    def __init__(
        self,
        nodes: Sequence[Node],
        ranks: Sequence[int],
        *,
        label: str,
        name: str,
    ) -> None:
        """The nodes' agents must not be used by anything else."""
        self.id = secrets.token_hex(8)
        self._nodes = nodes
        self._ranks = ranks
        self._label = label
        self._name = name
        self._failures: list[Exception] = []

    def start_gang(
        self,
        gather: Callable[[], Gang],
        tree: Tree | None,
        broadcast: Broadcast,
    ) -> None:
        """Starts a call on every rank. If it cannot start, raises the reason and leaves nothing behind."""

        def go() -> None:
            gang = gather()
            held = [[m.rank for m in gang.members if m.node is node] for node in self._nodes]
            self._tell(held, world=sum(self._ranks), on="all", elastic=gang.spec.elastic_agents)
            call = GangCall(broadcast)
            call.begin(gang, self._note)
            for node in self._nodes:
                node.session.wait(lambda: call.is_sent or call.future.done())

        self._start(go, tree)

    def start_one(
        self,
        plan: Callable[[Node], WorkerSpec],
        tree: Tree | None,
        function: PackedFunction,
        arguments: codec.Payload,
        *,
        timeout: float | None,
    ) -> None:
        """Starts a call on one host. Raises as `start_gang` does."""

        def go() -> None:
            (node,) = self._nodes
            self._tell([[0]], world=1, on="one", elastic=False)
            caller = _Detached(self._failures)
            node.call("solo.0", plan(node), function, arguments, timeout=timeout, caller=caller)
            node.session.wait(lambda: caller.is_sent or bool(self._failures))

        self._start(go, tree)

    def _start(self, go: Callable[[], None], tree: Tree | None) -> None:
        open_all(self._nodes, Events(), failed=lambda node: None)
        try:
            for node in self._nodes:
                if tree is not None and not node.sync_project(tree):
                    raise SkyfabError("a file of the project changed in this moment", hint="try again")
            go()
            if self._failures:
                raise self._failures[0]
            for node in self._nodes:
                node.session.abandon()
        except BaseException:
            close_all(self._nodes)
            raise

    def _note(self, error: BaseException | None) -> None:
        if isinstance(error, Exception):
            self._failures.append(error)

    def take_over(self, call: GangCall) -> None:
        """Turns a running broadcast into the run. Raises HostLost."""
        gang = call.gang
        assert gang is not None
        held = [[m.rank for m in gang.members if m.node is node] for node in self._nodes]
        self._tell(held, world=sum(self._ranks), on="all", elastic=gang.spec.elastic_agents)
        call.abandon(CallCancelled(f"{self._label} goes on as run {self.id[:8]}"))
        for node in self._nodes:
            node.session.abandon()

    def _tell(self, held: Sequence[Sequence[int]], **more: Any) -> None:
        """Sends each host a description of its part of the run. From then on the host records the run on disk."""
        for place, (node, ranks) in enumerate(zip(self._nodes, held, strict=True)):
            about = {
                "id": self.id,
                "name": self._name,
                "function": self._label,
                "host": node.name,
                "hosts": [each.name for each in self._nodes],
                "place": place,
                "ranks": list(ranks),
                "workdir": node.workdir.told,
                "python": node.agent.executable,
                **more,
            }
            node.session.ask(messages.Detach(run=self.id, about=about))


class _Detached:
    """The `Caller` of a call whose reply stays on its host."""

    def __init__(self, failures: list[Exception]) -> None:
        self._failures = failures
        self.is_sent = False

    def is_wanted(self) -> bool:
        return True

    def sent(self, stream: int) -> None:
        self.is_sent = True

    def answered(self, message: messages.Message, buffers: list[memoryview]) -> None:
        pass

    def failed(self, error: Exception) -> None:
        self._failures.append(error)
