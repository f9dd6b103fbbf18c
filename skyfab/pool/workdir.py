"""The working directory of functions on each host, and the report of the files that they wrote there.

``"auto"`` corresponds to the current folder here: on a host, a persistent folder in the cache; on this machine, the
current folder itself. A path is that folder on every host. ``"temp"`` is deleted with the pool.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

from skyfab.detached.written import Written, current_folder, event, parse, project
from skyfab.errors import SkyfabError, UsageError
from skyfab.inventory.host import CHECKS, Host
from skyfab.inventory.inventory import Inventory
from skyfab.protocol import messages
from skyfab.ui.events import Events

_TIMEOUT: Final = 2.0
"""Timeout in seconds for the hosts' lists of written files, when a pool closes."""


@dataclass(frozen=True, slots=True)
class Workdir:
    """The working directory on one host."""

    sent: str = ""
    """As sent to the agent: a path, the name of a folder in its cache, or "" for a folder of the pool."""
    callers: bool = False
    """It is the caller's own folder, so `includes` need not be copied there."""


class Workdirs:
    """The working directory of a pool on each of its hosts."""

    def __init__(self, choice: str | os.PathLike[str]) -> None:
        """Raises UsageError for an invalid choice."""
        try:
            self._choice: str = CHECKS["workdir"](os.fspath(choice) if isinstance(choice, os.PathLike) else choice)
        except UsageError as error:
            raise UsageError(f"workdir {error.message}", hint=error.hint) from None
        self._here = current_folder()

    def of(self, host: Host) -> Workdir:
        choice = host.workdir if self._choice == "auto" else self._choice
        if choice == "temp" or (choice == "auto" and not self._here):
            return Workdir()
        if host.transport == "local" and choice in ("auto", self._here):
            return Workdir(self._here, callers=True)
        return Workdir(project(self._here) if choice == "auto" else choice)


class _Node(Protocol):
    """The part of a node that is used here."""

    name: str
    host: Host
    lost: Exception | None
    workdir: Workdir

    @property
    def session(self) -> Any: ...


def tell_files(nodes: Sequence[_Node], inventory: Inventory, events: Events) -> None:
    """Emits events about files that were written on other machines. Hosts that do not reply in time are skipped."""
    if not events.active:
        return
    waiting: list[tuple[_Node, list[messages.Message | Exception]]] = []
    for node in nodes:
        if node.lost is None and is_kept(node) and node.session.responds:
            replies: list[messages.Message | Exception] = []
            with suppress(SkyfabError):
                node.session.send(
                    messages.Written(), answer=lambda message, _, to=replies: to.append(message), failure=replies.append
                )
                waiting.append((node, replies))
    until = time.monotonic() + _TIMEOUT
    for node, replies in waiting:
        node.session.wait(lambda got=replies: bool(got), max(0.0, until - time.monotonic()))
        for written in _written(replies):
            if written.workdir == node.workdir.sent:
                events.emit(event(node.host, inventory, written))


def _written(replies: Sequence[messages.Message | Exception]) -> Sequence[Written]:
    with suppress(ValueError, RecursionError):
        if replies and isinstance(replies[0], messages.Done):
            return parse(json.loads(replies[0].text))
    return []


def is_kept(node: _Node) -> bool:
    """Its working directory is on another machine, and is persistent."""
    return bool(node.workdir.sent) and node.host.transport != "local"
