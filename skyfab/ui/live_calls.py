"""The live lines of running calls: what runs, on how many ranks, for how long, what is imported, how far a map is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
class _Function:
    """The calls of one function that run now."""

    since: float
    calls: dict[tuple[int, str], int]
    """Ranks by call and host."""


@dataclass(slots=True)
class _Map:
    since: float
    done: int
    total: int


class Calls:
    """The calls that run now, by function."""

    def __init__(self, clock: Callable[[], float], imports: Imports) -> None:
        self._clock = clock
        self._imports = imports
        self._functions: dict[str, _Function] = {}
        self._maps: dict[str, _Map] = {}

    def __bool__(self) -> bool:
        return bool(self._functions or self._maps)

    def take(self, event: CallStarted | CallEnded | Mapped) -> bool:
        """Returns whether it is the first: from then on the lines are to be redrawn."""
        was_idle = not self
        if isinstance(event, Mapped):
            self._map(event)
        elif isinstance(event, CallStarted):
            one = self._functions.setdefault(event.function, _Function(self._clock(), {}))
            one.calls[event.call, event.host] = event.ranks
        elif event.function in self._functions:
            calls = self._functions[event.function].calls
            calls.pop((event.call, event.host), None)
            if not calls:
                del self._functions[event.function]
        return was_idle and bool(self)

    def _map(self, event: Mapped) -> None:
        if event.failed or event.done >= event.total:
            self._maps.pop(event.function, None)
        else:
            one = self._maps.setdefault(event.function, _Map(self._clock(), 0, event.total))
            one.done = event.done

    def lines(self) -> list[str]:
        """One for each function, the maps first."""
        found = list(self._lines())
        return found if len(found) <= _MOST else [*found[: _MOST - 1], f"{len(found) - _MOST + 1} more"]

    def _lines(self) -> Iterator[str]:
        now = self._clock()
        for name, one in self._maps.items():
            if now - one.since >= _AFTER:
                yield clean(f"{name} · {_progress(one, now - one.since)}{self._importing(name)}", colour=False)
        for name, function in self._functions.items():
            if now - function.since >= _AFTER and name not in self._maps:
                ranks = counted(sum(function.calls.values()), "rank")
                spent = _time(now - function.since)
                yield clean(f"{name} · {ranks} · {spent}{self._importing(name)}", colour=False)

    def _importing(self, name: str) -> str:
        """What hosts import for this function, if it takes long."""
        imports = self._imports.since(_AFTER)
        hosts = {host for _, host in self._functions[name].calls} if imports and name in self._functions else ()
        modules = dict.fromkeys(event.module for event in imports if event.host in hosts)
        return f" · importing {', '.join(modules)}" if modules else ""


def _progress(one: _Map, elapsed: float) -> str:
    rate = one.done / elapsed
    rest = f" · {rate:.3g}/s · {_time((one.total - one.done) / rate)} left" if one.done else ""
    return f"{one.done:,} of {one.total:,}{rest}"


def _time(seconds: float) -> str:
    """
    >>> _time(12.7), _time(3700)
    ('0:12', '1:01:40')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
