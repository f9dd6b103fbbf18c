"""Hearing: what a host says unasked, as events for those who look and as facts for its pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skyfab.errors import HostError, ProtocolError
from skyfab.pool.gangs import Gangs
from skyfab.pool.node import Node
from skyfab.pool.recovery import Homecoming
from skyfab.pool.scheduler import Queue
from skyfab.session.lines import Lines
from skyfab.ui.events import Events, HostState, Moved, Output


class Hearing:
    """Listens to one node."""

    def __init__(
        self,
        events: Events,
        gangs: Gangs,
        queue: Queue,
        homecoming: Homecoming | None,
        all_nodes: Callable[[], Sequence[Node]],
    ) -> None:
        """Without a `homecoming`, a node that is lost stays so."""
        self._homecoming = homecoming
        self._all_nodes = all_nodes
        self._events = events
        self._gangs = gangs
        self._queue = queue
        self.node: Node | None = None
        """Set before anything is heard."""

    def wrote(self, seat: str, lines: Lines) -> None:
        if not self._events.active:
            return
        assert self.node is not None
        rank = self._gangs.rank_of(self.node, seat)
        for text, end in lines:
            self._events.emit(Output(host=self.node.name, rank=rank, stream=lines.stream, text=text, end=end))

    def exited(self, seat: str, generation: int) -> None:
        assert self.node is not None
        self.node.vacated(seat, generation)
        self._gangs.vacated(self.node, seat)

    def lost(self, error: HostError) -> None:
        assert self.node is not None
        stranger = isinstance(error.__cause__, ProtocolError)  # whatever speaks there, it is not one of ours
        if self._homecoming is not None and not stranger:
            self._homecoming.expect(self.node, error)
        else:
            self.node.lost = error
        self._events.emit(HostState(host=self.node.name, state="lost", detail=error.message))
        self._queue.advance()

    def apart(self, reason: str) -> None:
        assert self.node is not None
        others = [node for node in self._all_nodes() if node is not self.node and node.lost is None]
        if others and not self.others_answer():
            reason += "; no host answers: is this machine's network up?"
        self._events.emit(HostState(host=self.node.name, state="reconnecting", detail=reason))

    def together(self, seconds: float) -> None:
        assert self.node is not None
        self._events.emit(HostState(host=self.node.name, state="ready", detail=f"back after {seconds:.1f} s"))

    def others_answer(self) -> bool:
        """Some other host has been heard in the last seconds; a silent one may take that long to be noticed."""
        return any(node.session.responds for node in self._all_nodes() if node is not self.node)


class Progress:
    """Tells how far a host's preparation is."""

    def __init__(self, events: Events, host: str) -> None:
        self._events = events
        self._host = host

    def step(self, text: str) -> None:
        self._events.emit(HostState(host=self._host, state="preparing", detail=text))

    def moved(self, what: str, done: int, total: int) -> None:
        self._events.emit(Moved(host=self._host, what=what, done=done, total=total))
