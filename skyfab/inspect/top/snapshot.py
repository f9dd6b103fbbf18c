"""`Snapshot`: what `skyfab top` shows at one moment, as rows of cells. Draws nothing."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

from skyfab._util.sizes import counted
from skyfab.detached.find import runs_of
from skyfab.detached.folder import Part
from skyfab.detached.run import Run
from skyfab.host.gpu_locks import age
from skyfab.inspect.columns import NAMES, cells
from skyfab.inspect.top.monitor import Seen
from skyfab.inventory.inventory import Inventory
from skyfab.ui.terminal import clean

HOSTS: Final = ("host", "address", *NAMES)
RUNS: Final = ("run", "state", "age", "ranks", "hosts", "name", "last line")
_ORDER: Final = ("running", "unreachable", "lost")
"""States of the runs that are shown first."""
_LATE: Final = 3.0
"""A host is late if it has not answered for this many seconds more than the pause between two questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All rows, and the line above them."""

    summary: str
    hosts: dict[str, tuple[str, ...]]
    """The cells of each host, by its name."""
    runs: dict[str, tuple[str, ...]]
    """The cells of each run, by its id."""
    found: dict[str, Run]
    """The runs by id."""

    def run_on(self, host: str) -> str | None:
        """The id of the first run that is on a host."""
        return next((run for run in self.runs if host in self.found[run].hosts), None)


def snapshot(seen: Sequence[Seen], inventory: Inventory, *, every: float, clock: float, now: float) -> Snapshot:
    """`clock` is that of `Seen.heard`; `now` is the time of day, in seconds since 1970."""
    hosts = [one.host for one in seen]
    answered = {one.host.name for one in seen if one.heard is not None and one.error is None}
    found = runs_of([part for one in seen for part in _parts(one)], inventory, hosts, "data")
    found = [run for run in found if not is_older(run, answered)]
    found.sort(key=lambda run: _ORDER.index(run.state) if run.state in _ORDER else len(_ORDER))  # stable: latest first
    return Snapshot(
        summary=_summary(seen, [_condition(one, every, clock) for one in seen], found),
        hosts={one.host.name: _host_cells(one, every, clock) for one in seen},
        runs={run.id: _run_cells(run, now) for run in found},
        found={run.id: run for run in found},
    )


def _parts(one: Seen) -> Sequence[Part]:
    """The runs on a host. If it does not answer, those that ran may have ended since."""
    if one.error is None:
        return one.parts
    return [replace(part, state="unreachable") if part.state == "running" else part for part in one.parts]


def is_older(run: Run, answered: Set[str]) -> bool:
    """Whether it has ended, and is no longer among the latest of a host: hosts send only some that have ended."""
    places = {part.about.place for part in run.parts}
    missing = {name for place, name in enumerate(run.hosts) if place not in places}
    return run.state not in ("running", "lost") and bool(missing) and missing <= answered


def _condition(one: Seen, every: float, clock: float) -> str:
    if one.error is not None:
        return "lost"
    if one.heard is None:
        return "connecting"
    return "late" if clock - one.heard > every + _LATE else "ready"


def _summary(seen: Sequence[Seen], conditions: Sequence[str], runs: Sequence[Run]) -> str:
    """``64 hosts: 62 ready, 1 connecting, 1 lost · 12 of 16 GPUs busy · 3 runs, 2 running``"""
    names = ("ready", "connecting", "late", "lost")
    parts = [f"{conditions.count(name)} {name}" for name in names if name in conditions]
    said = [f"{counted(len(seen), 'host')}: {', '.join(parts)}"]
    gpus = [gpu for one in seen if one.survey and not one.error for gpu in one.survey.gpus]
    if gpus:
        said.append(f"{sum(gpu.is_busy for gpu in gpus)} of {counted(len(gpus), 'GPU')} busy")
    if waiting := sum(len(one.survey.queue) for one in seen if one.survey and not one.error):
        said.append(f"{waiting} waiting for GPUs")
    running = sum(run.state == "running" for run in runs)
    said.append(f"{counted(len(runs), 'run')}, {running} running" if runs else "no runs")
    return " · ".join(said)


def _host_cells(one: Seen, every: float, clock: float) -> tuple[str, ...]:
    known = ("–",) * len(NAMES) if one.survey is None else cells(one.survey, one.survey.gpus_of(one.host))
    made = (one.host.name, one.host.place, *known[:-1], _state(one, known[-1], every, clock))
    return tuple(clean(cell, colour=False) for cell in made)


def _state(one: Seen, ready: str, every: float, clock: float) -> str:
    condition = _condition(one, every, clock)
    since = "" if one.heard is None else age(clock - one.heard)
    if one.error is not None:
        return f"last heard {since} ago: {one.error.message}" if since else one.error.message
    return f"no response for {since}" if condition == "late" else ready if condition == "ready" else condition


def _run_cells(run: Run, now: float) -> tuple[str, ...]:
    state, last = run.summary
    since = age(max(0.0, now - run.started))
    made = (run.id[:8], state, since, str(run.world_size), ", ".join(run.hosts), run.name, last)
    return tuple(clean(cell, colour=False).expandtabs() for cell in made)
