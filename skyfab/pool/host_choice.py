"""Which hosts a pool has: those that are selected, and of these the ones that meet its condition when it is opened.

A provider makes them first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Final

from skyfab.errors import UsageError
from skyfab.inspect.condition import Condition
from skyfab.inspect.survey import SURVEY, Survey
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.inventory.selection import some
from skyfab.pool.images import install_python
from skyfab.providers.base import Provider
from skyfab.session.ask import Asker, Outcome
from skyfab.ssh import transport_for
from skyfab.ssh.base import Transport
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
        self._condition = None if where is None else Condition(where)
        self._nodes = nodes
        self._items = hosts if hosts is None or isinstance(hosts, (str, Host)) else list(hosts)
        self._transports: dict[str, Transport] = {}
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
        """Stops the provider, if there is one: its hosts are removed. Closes connections that were not used."""
        while self._transports:
            self._transports.popitem()[1].close()
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
        with Asker(self.listed, self.inventory, prepare=install_python(events)) as asker:
            outcomes = asker.ask(SURVEY)
            meets = [one.host for one in outcomes if one.answer and self._condition.fits(one.host, one.answer)]
            others = {one.host.name: self._reason(one) for one in outcomes if one.host not in meets}
            self._check_count(len(meets), others)
            chosen = meets[: self._nodes]
            self.adopt(asker, chosen)
        if others:
            events.emit(Notice(host=some(list(others)), text=f"excluded by {self._condition.text!r}"))
        return tuple(chosen)

    def adopt(self, asker: Asker, hosts: Iterable[Host]) -> None:
        """Takes the connections over which hosts were asked."""
        self._transports = {host.name: transport for host in hosts if (transport := asker.take(host))}

    def reach(self, host: Host) -> Transport:
        """A transport to a host: the one over which it was asked, the first time; then new ones."""
        return self._transports.pop(host.name, None) or transport_for(host, self.inventory)

    def _reason(self, outcome: Outcome[Survey]) -> str:
        if outcome.answer is None:
            return outcome.error.message if outcome.error else "no response"
        assert self._condition is not None
        return self._condition.values(outcome.host, outcome.answer)

    def _check_count(self, count: int, others: Mapping[str, str]) -> None:
        """Raises UsageError if too few hosts meet the condition."""
        assert self._condition is not None
        if count >= (self._nodes or 1):
            return
        lines = [f"\n  {name}: {reason}" for name, reason in others.items()]
        rest = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        text = repr(self._condition.text)
        meet = f"only {count} of {len(self.listed)} hosts meet {text}, but nodes={self._nodes}" if count else ""
        raise UsageError("".join([meet or f"no host meets {text}", *lines[:_SHOWN], rest]))


def _check_provider(provider: object, inventory: object) -> None:
    if not isinstance(provider, Provider):
        raise UsageError(
            f"Compute(provider={provider!r}) does not rent machines",
            hint="provider=sky.Container(nodes=2) creates containers; Compute(hosts=…) uses hosts of inventory.toml",
        )
    if inventory is not None:
        raise UsageError("a provider has its own inventory", hint="omit inventory=… or provider=…")
