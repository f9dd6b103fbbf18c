"""`Monitor`: queries hosts at intervals, each over one connection that stays open and on its own thread.

A host that is slow or lost delays no other one, and is never asked twice at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from skyfab.detached.folder import Part, question
from skyfab.errors import SkyfabError
from skyfab.inspect.survey import SURVEY, Survey
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.session.ask import Asker
from skyfab.session.question import Question

_ENDED: Final = 8
"""Runs that have ended and are shown all the same, on each host."""
RUNS: Final[Question[list[Part]]] = question(ended=_ENDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is known of one host."""

    host: Host
    survey: Survey | None = None
    parts: tuple[Part, ...] = ()
    """Of the runs on it."""
    heard: float | None = None
    """When it has answered last, by the monotonic clock."""
    error: SkyfabError | None = None
    """Why it does not answer; it is asked again."""


class Monitor:
    """Looks at all hosts every `every` seconds, from entering the block until its end."""

    def __init__(self, hosts: Sequence[Host], inventory: Inventory, every: float) -> None:
        self._every = every
        self._over = threading.Event()
        self._seen = {host.name: Seen(host=host) for host in hosts}
        self._asker = Asker(hosts, inventory)

    def __enter__(self) -> Monitor:
        began = time.monotonic()
        for place, host in enumerate(self._asker.hosts):
            first = began + self._every * place / len(self._seen)  # so that they do not all answer at once
            threading.Thread(target=self._watch, args=(host, first), daemon=True, name="skyfab-top").start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._asker.__exit__(*error)

    def seen(self) -> list[Seen]:
        """What is known of each host, in order."""
        return list(self._seen.values())

    def _watch(self, host: Host, first: float) -> None:
        while not self._over.is_set():
            try:
                survey, parts = self._asker.ask_one(SURVEY, host), self._asker.ask_one(RUNS, host)
                now = Seen(host=host, survey=survey, parts=tuple(parts), heard=time.monotonic())
            except SkyfabError as error:
                now = replace(self._seen[host.name], error=error)
            if not self._over.is_set():
                self._seen[host.name] = now
            self._over.wait(self._every - (time.monotonic() - first) % self._every)
