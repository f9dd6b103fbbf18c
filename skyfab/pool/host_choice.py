"""Which hosts a pool has: those that are selected, and of these the ones that meet its condition when it is opened.

A provider makes them first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

from skyfab.errors import SkyfabError, UsageError
from skyfab.inspect.condition import Condition
from skyfab.inspect.survey import Survey
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.inventory.selection import some
from skyfab.providers.base import Provider
from skyfab.ui.events import Events, Notice

_SHOWN: Final = 8
"""Hosts that are named with what they have."""


class HostChoice:
    """The hosts of a pool. `listed` are those that the selection names, known before anything is connected to.

    With a provider there are none before it is started.
    """

    def __init__(
        self,
        hosts: str | Host | Iterable[str | Host] | None,
        inventory: str | os.PathLike[str] | Inventory | None,
        *,
        nodes: int | None,
        where: str | None,
        provider: Provider | None = None,
    ) -> None:
        """Raises InventoryError and UsageError."""
        if provider is not None:
            _check_provider(provider, inventory)
        self._provider = provider
        self._condition = None if where is None else Condition.parse(where)
        self._nodes = nodes
        self._items = hosts if hosts is None or isinstance(hosts, (str, Host)) else list(hosts)
        self.inventory = Inventory(hosts={})
        self.listed: tuple[Host, ...] = ()
        if provider is None:
            self._list(Inventory.of(inventory))

    def _list(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self.listed = inventory.select(self._items, nodes=self._nodes)
        if self._condition is not None:
            self.listed = inventory.select(self._items)

    def release(self) -> None:
        """Stops the provider, if there is one: its hosts are removed."""
        if self._provider is not None:
            self._provider.stop()

    def choose(self, events: Events) -> tuple[Host, ...]:
        """The hosts to open: the first that meet the condition, if there is one. Connects to all listed to see that.

        A provider is started, and stopped by `release`. A host that cannot be reached does not meet the condition.
        Raises UsageError if too few do.
        """
        if self._provider is not None:
            name = type(self._provider).__name__
            self._list(self._provider.start(lambda text: events.emit(Notice(host=name, text=text))))
        if self._condition is None:
            return self.listed
        from skyfab.pool.each_host import surveys

        found = surveys(self.listed, self.inventory)
        chosen: list[Host] = []
        others: dict[str, str] = {}
        for host, outcome in zip(self.listed, found, strict=True):
            if isinstance(outcome, Survey) and self._condition.fits(host, outcome):
                chosen.append(host)
            else:
                others[host.name] = self._reason(host, outcome)
        if len(chosen) < (self._nodes or 1):
            what = f"nodes={self._nodes}, but only {len(chosen)}" if chosen else "none"
            lines = [f"\n  {name}: {reason}" for name, reason in others.items()]
            rest = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
            meet = f"{what} of {len(self.listed)} hosts meet {self._condition.text!r}"
            raise UsageError("".join([meet, *lines[:_SHOWN], rest]))
        chosen = chosen[: self._nodes]
        if others:
            events.emit(Notice(host=some(list(others)), text=f"left out by {self._condition.text!r}"))
        return tuple(chosen)

    def _reason(self, host: Host, outcome: Survey | SkyfabError) -> str:
        assert self._condition is not None
        return self._condition.values(host, outcome) if isinstance(outcome, Survey) else outcome.message


def _check_provider(provider: object, inventory: object) -> None:
    if not isinstance(provider, Provider):
        raise UsageError(
            f"Compute(provider={provider!r}) rents no machines",
            hint="provider=sky.Container(nodes=2) makes some here; Compute(hosts=…) takes those of inventory.toml",
        )
    if inventory is not None:
        raise UsageError("a provider has an inventory of its own", hint="leave out inventory=…, or provider=…")
