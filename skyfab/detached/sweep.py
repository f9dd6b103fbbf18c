"""The trials of a sweep, as its hosts have noted them (skyfab.host.sweep)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from skyfab._util import schema
from skyfab.detached.folder import LATEST, content_of
from skyfab.detached.run import Run
from skyfab.errors import UsageError
from skyfab.inventory.host import Host
from skyfab.session.question import Question

LABEL: Final = "sweep "
"""How the function of a run that is a sweep begins."""
_FOLDER: Final = re.compile(r"sweeps/[\w.=+-]+-\d{4}-\d{6}/\d{4,}[\w.=+-]*", re.ASCII)
_LIMITS: Final = schema.Limits(characters=131_072, items=100_000)
"""An argument has at most 128 KiB on Linux. Words stay whole: --resume compares them with what was typed."""
_ORDER: Final = ("waiting", "given", "running", "failed", "done")
"""The steps of a trial."""
Step = Literal["waiting", "given", "running", "failed", "done", "lost", "stopped", "not started", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A trial, and what is known about it."""

    trial: int
    """Its number, from 1."""
    state: Step
    words: tuple[str, ...] = ()
    folder: str = ""
    """Below the working folder of its host."""
    rank: int = 0
    host: str = ""
    seconds: float | None = None
    code: int | None = None
    error: str = ""
    """The last line of its log, if it failed."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What it has reported."""

    def __post_init__(self) -> None:
        """A host may send anything. Raises schema.Invalid."""
        if not all(isinstance(value, (str, int, float, type(None))) for value in self.values.values()):
            raise schema.Invalid("expected numbers and strings", ("values",))
        if not 0 <= (self.seconds or 0) < LATEST:
            raise schema.Invalid("out of range", ("seconds",))
        if self.folder and not _FOLDER.fullmatch(self.folder):  # --resume uses it on other hosts
            raise schema.Invalid("not the folder of a trial", ("folder",))


class Sweep:
    """A sweep that this program or another one has started."""

    def __init__(self, run: Run) -> None:
        """`run` must be attached: its connections are used. Raises UsageError if it is not a sweep."""
        if not run.function.startswith(LABEL):
            raise UsageError(f"run {run.id[:8]} is not a sweep", hint=f"skyfab attach {run.id[:8]}")
        self.run = run
        self._read: dict[str, int] = {}
        """How much of each host's file is known."""
        self._known: dict[int, Trial] = {}
        self._lost: set[tuple[int, int]] = set()
        """Trials that rank 0 has lost with the rank that has them."""

    def look(self) -> list[Trial]:
        """All trials, by what the hosts that respond have noted."""
        run = self.run
        run.look()
        assert run.asker is not None
        ranks = {part.host: part.about.place for part in run.parts}
        hosts = [host for host in run.asker.hosts if host.name in ranks]
        for outcome in run.asker.each(lambda host: self._fetch(host, ranks[host.name]), hosts):
            for line in outcome.answer or ():
                self._read[outcome.host.name] = self._read.get(outcome.host.name, 0) + len(line)
                self._take(line)
        return [replace(self._known[number], state=self._state(self._known[number])) for number in sorted(self._known)]

    def _fetch(self, host: Host, rank: int) -> list[bytes]:
        """The complete lines of a host's file that are new."""
        assert self.run.asker is not None
        arguments = {"run": self.run.id, "name": f"trials.{rank}", "start": self._read.get(host.name, 0)}
        content = self.run.asker.ask_one(Question("runs.content", content_of, arguments), host)
        lines = bytes(content or b"").splitlines(keepends=True)
        return [line for line in lines if line.endswith(b"\n")]

    def _take(self, line: bytes) -> None:
        try:
            text = json.dumps(json.loads(line), ensure_ascii=False).encode(errors="replace")  # strings may be any bytes
            found = schema.parse(Trial, json.loads(text), _LIMITS)
        except (ValueError, RecursionError):
            return  # not written by skyfab
        before = self._known.get(found.trial, found)
        if found.state == "lost":
            self._lost.add((found.trial, found.rank))
        elif found.state in _ORDER and _ORDER.index(found.state) >= _ORDER.index(before.state):
            words, folder = found.words or before.words, found.folder or before.folder
            self._known[found.trial] = replace(found, words=words, folder=folder)

    def _state(self, trial: Trial) -> Step:
        """Its last known step, unless that cannot be its state because the rank or the host has ended."""
        states = {part.about.place: part.state for part in self.run.parts}
        is_running = "running" in states.values()
        if trial.state == "waiting":
            if 0 not in states:
                return "unknown"  # only the first host, which has the list, knows whether it was given to a rank
            return "waiting" if states[0] == "running" else "not started"
        if trial.state in ("done", "failed"):
            return trial.state
        state = states.get(trial.rank)
        if state == "running" or (state is None and is_running and (trial.trial, trial.rank) not in self._lost):
            return "running"  # perhaps on a host that does not respond now
        if state is None and trial.rank == 0:
            return "unknown"  # no other host would note its end
        return "stopped" if state == "stopped" else "lost"
