"""`Screen`: shows a pool's events live on a terminal, with a line for each call that takes long. Also draws charts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from skyfab._util.sizes import counted
from skyfab.errors import located
from skyfab.ui.events import CallEnded, CallStarted, HostState, Mapped, Moved, Output, State, Step, Waiting
from skyfab.ui.printer import TIMEOUT, Imports, Line, View
from skyfab.ui.prompt import TERMINAL
from skyfab.ui.terminal import RESET, LiveLines, clean, fitting, put

_TICK: Final = 0.1
"""Seconds between updates of the live lines on a terminal."""
_AFTER: Final = 1.0
"""Seconds after which a call is shown: most are shorter."""
_MOST_CALLS: Final = 4
"""Lines of calls."""
_COLUMNS: Final = "▁▂▃▄▅▆▇█"
_WIDEST: Final = 60
"""Characters of a chart."""
_SPINNER: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_COLOURS: Final = tuple(f"\x1b[{code}m" for code in (36, 32, 33, 35, 34, 96, 92, 93, 95, 94))
_DIM, _RED, _GREEN = "\x1b[2m", "\x1b[31m", "\x1b[32m"


class Screen(View):
    """A terminal: lines with a coloured prefix for each host; below them live progress, redrawn in place."""

    _spinners: Sequence[str] = tuple(f"{spinner} " for spinner in _SPINNER)

    def __init__(self, clock: Callable[[], float], timeout: float = TIMEOUT, waiting: Waiting | None = None) -> None:
        """`waiting` is true while the program waits for a call, and so prints nothing itself."""
        super().__init__(clock, timeout)
        self._calls = _Calls(clock, self._imports)
        self._waits = Waiting() if waiting is None else waiting
        self._file = sys.stdout
        self._live = LiveLines()
        self._width = 0
        self._colours: dict[str, str] = {}
        self._details: dict[str, str] = {}
        """Hosts that are connecting or being prepared, and the current step."""
        self._silent: dict[str, tuple[float, float]] = {}
        """Hosts that do not answer: since when, and the seconds until they are lost."""
        self._ready: list[str] = []
        self._since = 0.0

    def _prefix(self, event: Output) -> str:
        place = located(event.host, event.rank)
        self._width = max(self._width, len(place))
        mark = _DIM if event.stream == "stdout" else _RED
        return f"{self._in(self._colour(event.host), f'{place:<{self._width}}')} {self._in(mark, '│')}"

    def _in(self, colour: str, text: str) -> str:
        return f"{colour}{text}{RESET}" if self._has_colours else text

    def _colour(self, host: str) -> str:
        return self._colours.setdefault(host, _COLOURS[len(self._colours) % len(_COLOURS)])

    def _state(self, event: HostState, before: State | None) -> None:
        self._colour(event.host)
        self._silent.pop(event.host, None)
        if event.state in ("connecting", "preparing", "reconnecting"):
            if event.host != "local":
                if not self._details:
                    self._since, self._ready = self._clock(), []
                self._details[event.host] = clean(f"{event.host} {event.detail or event.state}", colour=False)
                if event.limit is not None:
                    self._silent[event.host] = (self._clock(), event.limit)
        elif event.state in ("failed", "lost"):
            self._details.pop(event.host, None)
            self._say("stderr", f"{self._in(_RED, '✗')} {clean(str(event), colour=self._has_colours)}\n")
        elif event.state == "ready" and self._details.pop(event.host, ""):
            self._ready.append(event.host)
        self._waiting += 1
        if self._ready and not self._details:
            self._summary()

    def _moved(self, event: Moved) -> None:
        """Shows a transfer while its host is being prepared, and of files later, until it is complete."""
        is_ready = self._states.get(event.host) == "ready"
        if is_ready and event.done >= event.total:
            self._details.pop(event.host, None)
        elif is_ready or event.host in self._details:
            self._details[event.host] = clean(str(event), colour=False).replace(": ", " ", 1)
        self._waiting += 1

    def _step(self, event: Step) -> None:
        if event.text:
            self._details[event.host] = clean(f"{event.host} {event.text}", colour=False)
        else:
            self._details.pop(event.host, None)
        self._waiting += 1

    def _detail(self, host: str) -> str:
        """What a host is doing; of one that does not answer, for how long, and when it is lost."""
        if host not in self._silent:
            return self._details[host]
        since, limit = self._silent[host]
        passed = self._clock() - since
        return f"{self._details[host]} · reconnecting for {passed:.0f} s, lost in {max(0, limit - passed):.0f} s"

    def _running(self, event: CallStarted | CallEnded | Mapped) -> None:
        if self._calls.take(event):
            self._waiting += 1

    def _summary(self) -> None:
        """All hosts are ready or have failed. Not shown after a failure: the error has more details."""
        ready, self._ready = self._ready, []
        if "failed" not in self._states.values():
            who = ready[0] if len(ready) == 1 else f"{len(ready)} hosts"
            self._say("stderr", f"{self._in(_GREEN, '✓')} {who} ready in {self._clock() - self._since:.1f} s\n")

    def flush(self) -> None:
        with TERMINAL.drawing() as may_draw:
            if may_draw or self._over.is_set():
                super().flush()

    def _write(self, lines: list[Line]) -> None:
        with self._lock:
            spinner = self._spinners[int(self._clock() / _TICK) % len(self._spinners)]
            live = [f"{spinner}{self._detail(host)}" for host in self._details]
            calls = self._calls.lines() if self._is_waited_for() else []
            self._waits.over = self.flush if calls else None
            live += [f"{spinner}{call}" for call in calls]
            bars = sorted(self._bars.values(), key=lambda bar: bar.rank or 0)
            live += [f"{self._prefix(bar)} {clean(bar.text, colour=False)}" for bar in bars]
        self._draw(lines, live)

    def _is_waited_for(self) -> bool:
        """Whether lines of calls may be drawn: what the program prints meanwhile would get into them."""
        return bool(self._waits)

    def _draw(self, lines: list[Line], live: Sequence[str]) -> None:
        put(self._file, self._live.frame("".join(text for _, text in lines), live))

    def close(self) -> None:
        with self._lock:
            self._details.clear()
        super().close()

    def _pace(self) -> float:
        return _TICK if self._details or self._bars else super()._pace()

    def _restless(self) -> float | None:
        return _TICK if self._details or self._calls or self._lines else None


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


class _Calls:
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
        return fitting(found, _MOST_CALLS)

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


def columns(values: Sequence[float]) -> str:
    """Numbers as a small bar chart in one line, scaled from the minimum to the maximum.

    >>> columns([0, 1, 2, 3, 4, 5, 6, 7])
    '▁▂▃▄▅▆▇█'
    """
    if len(values) > _WIDEST:
        values = [values[at * (len(values) - 1) // (_WIDEST - 1)] for at in range(_WIDEST)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    span = high - low or 1.0
    return "".join(_COLUMNS[round((value - low) / span * (len(_COLUMNS) - 1))] for value in values)
