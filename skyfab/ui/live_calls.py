"""The live lines of running calls: what runs, on how many ranks, for how long, what is imported, how far a map is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from skyfab._util.sizes import counted
from skyfab.ui.events import CallEnded, CallStarted, Mapped
from skyfab.ui.printer import Imports
from skyfab.ui.terminal import clean

_AFTER: Final = 1.0
"""Seconds after which a call is shown: most are shorter."""
_MOST: Final = 4
"""Lines."""


@dataclass(slots=True)
class _Running:
    """The calls of one function that run now, and the progress of its map."""

    since: float
    ranks: dict[tuple[int, str], int] = field(default_factory=dict)
    """By call and host."""
    done: int = 0
    total: int = 0
    """The items of the map; 0 without one."""

    def progress(self, elapsed: float) -> str:
        if not self.total:
            return f"{counted(sum(self.ranks.values()), 'rank')} · {_time(elapsed)}"
        rate = self.done / elapsed
        rest = f" · {rate:.3g}/s · {_time((self.total - self.done) / rate)} left" if self.done else ""
        return f"{self.done:,} of {self.total:,}{rest}"


class Calls:
    """The calls that run now, by function."""

    def __init__(self, clock: Callable[[], float], imports: Imports) -> None:
        self._clock = clock
        self._imports = imports
        self._functions: dict[str, _Running] = {}

    def __bool__(self) -> bool:
        return bool(self._functions)

    def take(self, event: CallStarted | CallEnded | Mapped) -> bool:
        """Returns whether it is the first: from then on the lines are to be redrawn."""
        was_idle = not self._functions
        one = self._functions.get(event.function) or _Running(self._clock())
        if isinstance(event, Mapped):
            is_over = event.failed or event.done >= event.total
            one.done, one.total = (0, 0) if is_over else (event.done, event.total)
        elif isinstance(event, CallStarted):
            one.ranks[event.call, event.host] = event.ranks
        else:
            one.ranks.pop((event.call, event.host), None)
        if one.ranks or one.total:
            self._functions[event.function] = one
        else:
            self._functions.pop(event.function, None)
        return was_idle and bool(self._functions)

    def lines(self) -> list[str]:
        """One for each function that takes long."""
        now = self._clock()
        found = [
            clean(f"{name} · {one.progress(now - one.since)}{self._importing(one)}", colour=False)
            for name, one in self._functions.items()
            if now - one.since >= _AFTER
        ]
        return found if len(found) <= _MOST else [*found[: _MOST - 1], f"{len(found) - _MOST + 1} more"]

    def _importing(self, one: _Running) -> str:
        """What hosts import for this function, if it takes long."""
        hosts = {host for _, host in one.ranks}
        modules = dict.fromkeys(event.module for event in self._imports.since(_AFTER) if event.host in hosts)
        return f" · importing {', '.join(modules)}" if modules else ""


def _time(seconds: float) -> str:
    """
    >>> _time(12.7), _time(3700)
    ('0:12', '1:01:40')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
