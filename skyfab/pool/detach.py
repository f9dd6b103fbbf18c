"""Detached runs: starts a call on agents of its own, or takes over a running broadcast, and disconnects from them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final

from skyfab.calls.call import Function
from skyfab.calls.pack import PackedCall, pack_arguments, pack_function
from skyfab.calls.project import Tree
from skyfab.errors import CallCancelled, SkyfabError, UsageError
from skyfab.host.agent.outcomes import replay
from skyfab.pool.broadcast import Broadcast, Gang
from skyfab.pool.node import Node, WorkerSpec
from skyfab.pool.nodes import close_all, open_all
from skyfab.protocol import messages
from skyfab.session.replies import Reply
from skyfab.ui.events import Events

_REPLAY: Final = Function(replay)
_LONGEST: Final = 100
"""Characters of the name of a run."""


class Detacher:
    """Starts one detached run on its hosts."""

    def __init__(self, nodes: Sequence[Node], ranks: Sequence[int], *, label: str, name: str | None) -> None:
        """The nodes' agents must not be used by anything else. Raises UsageError for a name that cannot be shown."""
        if name is not None and not (name.strip() and name.isprintable() and len(name) <= _LONGEST):
            hint = f"use printable characters, not only spaces, {_LONGEST} at most"
            raise UsageError(f"invalid name of a run: {name[:_LONGEST]!r}", hint=hint)
        self.id = secrets.token_hex(8)
        self._nodes = nodes
        self._ranks = ranks
        self._label = label
        self._name = name or label

    def start_gang(self, gather: Callable[[], Gang], tree: Tree | None, call: PackedCall) -> None:
        """Starts a call on every rank. If it cannot start, raises the reason and leaves nothing behind."""

        def go() -> None:
            gang = gather()
            self._describe_gang(gang)
            broadcast = Broadcast(call, untrusted=gang.spec.plain)
            broadcast.begin(gang)
            for node in self._nodes:
                node.session.wait(lambda: broadcast.is_sent or broadcast.future.done())
            if broadcast.future.done():
                broadcast.future.result()

        self._start(go, tree)

    def start_one(self, spec_of: Callable[[Node, str], WorkerSpec], tree: Tree | None, call: PackedCall) -> None:
        """Starts a call on one host. Raises as `start_gang` does."""

        def go() -> None:
            (node,) = self._nodes
            self._describe([[0]], world=1, on="one", elastic=False)
            self._send(node, "solo.0", spec_of(node, call.tree), call)

        self._start(go, tree)

    def _start(self, go: Callable[[], None], tree: Tree | None) -> None:
        for node in self._nodes:
            node.owner += f".{self.id}"
        open_all(self._nodes, Events(), settled=lambda node: None)
        try:
            for node in self._nodes:
                if tree is not None and not node.store.sync(tree):
                    raise SkyfabError("a file of the project changed at the same time", hint="try again")
            go()
            self._leave()
        except BaseException:
            close_all(self._nodes)
            raise

    def take_over(self, broadcast: Broadcast) -> None:
        """Turns a running broadcast into the run. Raises HostLost."""
        assert broadcast.gang is not None
        self._describe_gang(broadcast.gang)
        # From now on hosts keep replies. Those that were sent before are here, and are returned to the hosts.
        for member, value, error in broadcast.abandon(CallCancelled(f"{self._label} continues as run {self.id[:8]}")):
            arguments = pack_arguments(_REPLAY(value, error))
            call = PackedCall(function=pack_function(_REPLAY, each=False), arguments=arguments, label=self._label)
            self._send(member.node, member.worker, member.spec, call)
        self._leave()

    def _send(self, node: Node, worker: str, spec: WorkerSpec, call: PackedCall) -> None:
        """Sends a call whose reply stays on the host. Raises the reason if it cannot be sent."""
        reply = Reply()
        node.call(worker, spec, call, caller=reply)
        node.session.wait(lambda: reply.stream > 0 or reply.is_there)
        if not reply.stream:
            reply.wait()

    def _leave(self) -> None:
        """Raises HostLost unless every host has all of the run. Until then no host is left to run a part alone."""
        for node in self._nodes:
            node.session.connection.settle()
        for node in self._nodes:
            node.session.abandon()

    def _describe_gang(self, gang: Gang) -> None:
        held = [[member.rank for member in gang.members if member.node is node] for node in self._nodes]
        self._describe(held, world=sum(self._ranks), on="all", elastic=gang.spec.elastic_agents)

    def _describe(self, held: Sequence[Sequence[int]], **more: Any) -> None:
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
                "workdir": node.workdir.sent,
                "python": node.agent.executable,
                **more,
            }
            node.session.ask(messages.Detach(run=self.id, about=about, owner=node.owner))
