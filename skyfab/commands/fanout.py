"""The same work on every host, each in a pool of its own: one that fails does not stop the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from skyfab.compute import Compute
from skyfab.errors import SkyfabError
from skyfab.events import Events, HostState
from skyfab.image import Image
from skyfab.inventory import Host, Inventory
from skyfab.ui import attach

R = TypeVar("R")


@dataclass(slots=True)
class Outcome(Generic[R]):
    """What came of one host."""

    host: Host
    result: R | None = None
    error: BaseException | None = None


def load(path: str | None) -> Inventory:
    """The inventory of `--inventory`, or the one that is found without."""
    return Inventory.find() if path is None else Inventory.load(path)


def fan_out(work: Callable[[Compute], R], hosts: str | None, inventory: Inventory, *, show: bool) -> list[Outcome[R]]:
    """Opens every selected host at once and does the work there; one outcome for each, in order.

    Ctrl-C closes them all. Raises what is not a SkyfabError: that is a mistake in the work.
    """
    outcomes: list[Outcome[R]] = [Outcome(host) for host in inventory.select(hosts)]
    # None of the caller's project goes along.
    pools = [
        Compute([outcome.host], inventory=inventory, image=Image(excludes=("*",)), ui="none") for outcome in outcomes
    ]

    def run(outcome: Outcome[R], pool: Compute) -> None:
        try:
            with pool:
                outcome.result = work(pool)
        except BaseException as error:  # noqa: BLE001  # it is the caller's, on another thread
            outcome.error = error

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in zip(outcomes, pools, strict=True)]
    events = Events()
    detach = attach(events, "auto") if show else lambda: None
    for outcome, pool in zip(outcomes, pools, strict=True):
        events.emit(HostState(host=outcome.host.name, state="connecting"))
        pool.events.subscribe(events.emit)
    try:
        _together(threads, pools)
    finally:
        detach()
    for outcome in outcomes:
        if outcome.error is not None and not isinstance(outcome.error, SkyfabError):
            raise outcome.error
    return outcomes


def _together(threads: list[threading.Thread], pools: list[Compute]) -> None:
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C
        closing = [threading.Thread(target=pool.close, daemon=True) for pool in pools]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(5)
        raise
