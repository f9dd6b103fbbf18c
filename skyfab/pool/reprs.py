"""How a pool, its hosts and the futures of its calls show at a prompt, in a notebook and while it is open."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, Final, Literal

from skyfab._util.html import ShownAsTable
from skyfab.inventory.host import Host
from skyfab.session.session import Session
from skyfab.ui.events import Events

_HEAD: Final = ("host", "login", "Python", "platform", "GPUs", "state")


def show(events: Events, ui: Literal["auto", "rich", "plain", "none"], lease: float, until: ExitStack) -> None:
    """Shows what happens in a pool while it is open, on the terminal or as lines."""
    if ui != "none":
        from skyfab.ui.display import attach

        until.callback(attach(events, ui, timeout=lease / 4))


class ShownHost(ShownAsTable):
    """A host of a pool, with its state."""

    name: str
    host: Host
    session: Session
    lost: Exception | None

    @property
    @abstractmethod
    def gpus(self) -> tuple[int, ...]:
        """Their numbers."""

    @property
    def state(self) -> str:
        """ "ready", "lost" or "closed"."""
        return "lost" if self.lost is not None else "closed" if self.session.has_ended else "ready"

    def __repr__(self) -> str:
        return f"<Host {self.name}: {self.state}>"

    @property
    def row(self) -> Sequence[object]:
        """What a table shows of it."""
        agent = self.session.agent
        known = ("–", "–", "–") if agent is None else (agent.python, agent.platform, len(self.gpus))
        return (self.name, self.host.login, *known, self.state)

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        return _HEAD, [self.row]


class ShownPool(ShownAsTable):
    """A pool, with its hosts."""

    selected: Sequence[Host]
    hosts: Sequence[ShownHost]
    _open: bool

    def __repr__(self) -> str:
        names = ", ".join(host.name for host in self.selected[:8]) + (", …" if len(self.selected) > 8 else "")
        return f"<Compute {names or 'of a provider'}: {'open' if self._open else 'not open'}>"

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        if self._open:
            return _HEAD, [host.row for host in self.hosts]
        return _HEAD, [(host.name, host.login, "–", "–", "–", "not connected") for host in self.selected]


class ShownFuture(Future[Any], ShownAsTable):
    """A future, with its call and what came of it."""

    label: str
    node: ShownHost | None

    @property
    def state(self) -> str:
        """What came of it, or where it is."""
        if self.cancelled():
            return "cancelled"
        if not self.done():
            return "waiting" if self.node is None else "running"
        error = self.exception(0)
        return "done" if error is None else f"raised {type(error).__name__}"

    def __repr__(self) -> str:
        return f"<Future of {self.label}: {self.state}>" if self.label else f"<Future: {self.state}>"

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        return ("call", "host", "state"), [(self.label, self.node.name if self.node else "–", self.state)]
