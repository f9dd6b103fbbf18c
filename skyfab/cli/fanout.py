"""Does the same work on every host, each in a pool of its own, so that a failing host does not stop the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from skyfab.calls.image import Image
from skyfab.errors import SkyfabError
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.pool.compute import Compute
from skyfab.ui.events import Events, HostState
from skyfab.ui.screen import attach

R = TypeVar("R")

_CLOSE_TIMEOUT: Final = 3.0
"""Timeout in seconds for closing the pools after Ctrl-C."""


def load(path: str | None) -> Inventory:
    """The inventory of `--inventory`, else the default one."""
    return Inventory.of(path)


class Outcome(Generic[R]):
    """The result or error of the work on one host."""

    def __init__(self, host: Host, inventory: Inventory) -> None:
        self.host = host
        self.result: R | None = None
        self.error: BaseException | None = None
        # Nothing of the caller's project is sent.
        self.pool = Compute([host], inventory=inventory, image=Image(excludes=("*",)), workdir="temp", ui="none")


def fan_out(work: Callable[[Compute], R], hosts: str | None, inventory: Inventory, *, show: bool) -> list[Outcome[R]]:
    """Does the work on all selected hosts in parallel; returns one outcome for each, in order. Ctrl-C stops all.

    Raises an error that is not a SkyfabError: that is a bug in the work itself.
    """
    outcomes: list[Outcome[R]] = [Outcome(host, inventory) for host in inventory.select(hosts)]
    events = Events()
    detach = attach(events, "auto") if show else lambda: None
    for outcome in outcomes:
        events.emit(HostState(host=outcome.host.name, state="connecting"))
        outcome.pool.events.subscribe(events.emit)
    try:
        _run(work, outcomes)
    finally:
        detach()
    for outcome in outcomes:
        if outcome.error is not None and not isinstance(outcome.error, SkyfabError):
            raise outcome.error
    return outcomes


def _run(work: Callable[[Compute], R], outcomes: list[Outcome[R]]) -> None:
    over = threading.Event()

    def run(outcome: Outcome[R]) -> None:
        try:
            with outcome.pool as pool:
                if not over.is_set():
                    outcome.result = work(pool)
        except BaseException as error:  # for the caller's thread to report
            outcome.error = error

    threads = [threading.Thread(target=run, args=(outcome,), daemon=True) for outcome in outcomes]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C
        over.set()
        for outcome in outcomes:
            threads.append(threading.Thread(target=outcome.pool.close, daemon=True))
            threads[-1].start()
        deadline = time.monotonic() + _CLOSE_TIMEOUT
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        raise
