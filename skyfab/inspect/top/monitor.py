"""`Monitor`: looks at hosts again and again, each over one connection that stays open, each on a thread of its own.

A look is a call in a worker that waits on the host: starting an interpreter there for each would cost it more than the
look itself. A host that is slow or lost delays no other one, and is never asked twice at a time.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from skyfab.calls.call import Function, as_function
from skyfab.calls.image import Image
from skyfab.detached.folder import Part, parse_parts
from skyfab.errors import HostUnfit, ProtocolError, RemoteTraceback, SkyfabError
from skyfab.host.ask.glance import glance
from skyfab.inspect.survey import Survey
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.pool.compute import Compute
from skyfab.session.backoff import Backoff
from skyfab.session.fanout import for_each_host

_FIRST_RETRY: Final = 1.0
"""Seconds before a host is tried again for the first time."""
_LAST_RETRY: Final = 30.0
"""The maximum that these seconds grow to."""
_CLOSE_TIMEOUT: Final = 5.0
"""Seconds for closing all connections."""
_GLANCE: Final[Function[[str], str]] = as_function(glance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is known of one host."""

    host: Host
    survey: Survey | None = None
    parts: tuple[Part, ...] = ()
    """Of the runs on it."""
    gpus: int | None = None
    """How many it has, by what its agent or the inventory says."""
    heard: float | None = None
    """When it has answered last, by the monotonic clock."""
    error: SkyfabError | None = None
    """Why it cannot be asked; it is tried again."""


class Answers:
    """Parses what a host answers; what is the same as before is not parsed again."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._text = ""
        self._parts: tuple[Part, ...] = ()

    def parse(self, text: str) -> tuple[Survey, tuple[Part, ...]]:
        """Raises ProtocolError: a host may send anything."""
        try:
            survey, runs = json.loads(text)
            if not isinstance(survey, str) or not isinstance(runs, str):
                raise ValueError("two texts were expected")
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolError(f"not a look at a host: {error}", host=self._host) from None
        if runs != self._text:
            self._text, self._parts = runs, tuple(parse_parts(self._host, runs))
        return Survey.parse(survey, self._host), self._parts


def look(pool: Compute, answers: Answers) -> tuple[Survey, tuple[Part, ...]]:
    """Asks the one host of a pool. Raises a SkyfabError."""
    (node,) = pool.hosts
    return answers.parse(str(pool.run(_GLANCE(node.host.cache))))


class Monitor:
    """Looks at all hosts every so many seconds, from entering the block until its end."""

    def __init__(self, hosts: Sequence[Host], inventory: Inventory, every: float) -> None:
        self._inventory = inventory
        self._every = every
        self._over = threading.Event()
        self._seen = {host.name: Seen(host=host) for host in hosts}
        self._pools: dict[str, Compute] = {}
        self._bug: BaseException | None = None

    def __enter__(self) -> Monitor:
        began = time.monotonic()
        for place, seen in enumerate(self._seen.values()):
            first = began + self._every * place / len(self._seen)  # so that they do not all answer at once
            threading.Thread(target=self._watch, args=(seen.host, first), daemon=True, name="skyfab-top").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        closing = threading.Thread(
            target=for_each_host, args=(Compute.close, list(self._pools.values())), daemon=True, name="skyfab-top-close"
        )
        closing.start()
        closing.join(_CLOSE_TIMEOUT)

    def seen(self) -> list[Seen]:
        """What is known of each host, in order. Raises what has ended one of the threads: that is a bug."""
        if self._bug is not None:
            raise self._bug
        return list(self._seen.values())

    def _watch(self, host: Host, first: float) -> None:
        waits = Backoff(_FIRST_RETRY, _LAST_RETRY, jitter=0.3)
        while not self._over.is_set():
            answered = self._seen[host.name].heard
            try:
                self._look_until_it_fails(host, first)
            except Exception as error:
                known = error if isinstance(error, SkyfabError) else None
                if isinstance(error.__cause__, RemoteTraceback):  # raised on the host
                    known = HostUnfit(f"it cannot be looked at: {type(error).__name__}: {error}", host=host.name)
                if known is None:
                    self._bug = error
                    return
                self._note(replace(self._seen[host.name], error=known))
            if self._seen[host.name].heard != answered:
                waits = Backoff(_FIRST_RETRY, _LAST_RETRY, jitter=0.3)
            self._over.wait(waits.next())

    def _look_until_it_fails(self, host: Host, first: float) -> None:
        nothing = Image(excludes=("*",))  # of the caller's project is sent
        pool = Compute([host], inventory=self._inventory, image=nothing, workdir="temp", results="data", ui="none")
        self._pools[host.name] = pool
        if self._over.is_set():  # since then: no other thread would close it
            return
        answers = Answers(host.name)
        with pool:
            gpus = pool.hosts[0].agent.gpus if host.gpus == "auto" else len(host.gpus)
            while not self._over.is_set():
                survey, parts = look(pool, answers)
                self._note(Seen(host=host, survey=survey, parts=parts, gpus=gpus, heard=time.monotonic()))
                past = (time.monotonic() - first) % self._every
                self._over.wait(self._every - past)

    def _note(self, seen: Seen) -> None:
        if not self._over.is_set():
            self._seen[seen.host.name] = seen
