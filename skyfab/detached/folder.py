"""Reads the folder of a detached run on a host, over a plain shell. `skyfab.host.agent.run_folder` writes it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from skyfab._util.scripts import given, read
from skyfab.detached.written import Written, parse
from skyfab.session.shell import Shell

T = TypeVar("T")
State = Literal["running", "done", "failed", "stopped", "lost", "unreachable"]
_TOLD: Final[tuple[State, ...]] = ("running", "done", "failed", "stopped")
"""States that a host reports itself; the others are determined on this side."""
_LATEST: Final = 1e11
"""An upper limit for plausible timestamps."""

ALIVE: Final = read("detached/alive.sh")
_LOOK: Final = ALIVE + read("detached/look.sh")
_STOP: Final = ALIVE + read("detached/stop.sh")


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The description of a run, as stored on each of its hosts."""

    id: str
    name: str
    function: str
    hosts: tuple[str, ...]
    place: int
    """The index of this host in `hosts`."""
    ranks: tuple[int, ...]
    """The ranks on this host."""
    world: int
    on: str
    elastic: bool
    workdir: str = ""
    """Its working folder on this host, as it was sent to the agent; empty for one that goes with the run."""
    python: str = ""
    """The interpreter of its environment."""

    @classmethod
    def read(cls, text: str) -> About:
        """Parses the description. Raises ValueError: a host may send anything."""
        said = _object(text)
        wrong = [name for name, kind in _FIELDS.items() if type(said.get(name)) is not kind]
        if wrong:
            raise ValueError(f"not what a run has: {wrong[0]}")
        hosts = _several(said.get("hosts"), str)
        if not 0 <= said["place"] < len(hosts):
            raise ValueError("a place that none of its hosts has")
        return cls(
            hosts=hosts,
            ranks=_several(said.get("ranks"), int),
            **{name: said[name] for name in _FIELDS},
            **{name: said[name] for name in ("workdir", "python") if isinstance(said.get(name), str)},
        )


_FIELDS: Final = {"id": str, "name": str, "function": str, "place": int, "world": int, "on": str, "elastic": bool}
"""The fields with a single value."""


def _several(found: Any, kind: type[T]) -> tuple[T, ...]:
    if not isinstance(found, list) or not found or not all(type(one) is kind for one in found):
        raise ValueError(f"not a list of {kind.__name__}")
    if len(set(found)) < len(found):
        raise ValueError("the same twice")
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The state of a run on one host."""

    host: str
    about: About
    state: State
    started: float
    last: str = ""
    """The last line that a rank wrote on this host."""
    gpus: tuple[str, ...] = ()
    """For each GPU of the host its utilization in percent and the megabytes in use."""
    files: tuple[Written, ...] = ()
    """Files that it has written to persistent working folders; known once it has ended."""
    failed: tuple[tuple[int, float], ...] = ()
    """Ranks that have failed on this host, and when, by its clock."""


def read_parts(shell: Shell, run: str | None = None) -> list[Part]:
    """Reads the state of all runs on a host, or of one run; then without the GPUs, whose query may take a second."""
    return parse_parts(shell.host.name, shell.run(given(run=run or "") + _LOOK))


def parse_parts(host: str, text: str) -> list[Part]:
    """The runs on a host in what look.sh has printed there. Anything else in it is ignored."""
    lines = text.split("\n")  # a progress bar has \r in its line
    gpus = tuple(line.removeprefix("=gpu ") for line in lines if line.startswith("=gpu "))
    found = []
    for number, line in enumerate(lines):
        if line.startswith("=run "):
            try:
                found.append(_part(host, lines[number : number + 4], gpus))
            except (ValueError, IndexError):
                continue  # incomplete, or not written by skyfab
    return found


def _part(host: str, lines: list[str], gpus: tuple[str, ...]) -> Part:
    """Raises ValueError or IndexError."""
    _, name, alive = lines[0].split()
    about, status, last = About.read(lines[1]), _object(lines[2]), lines[3].removeprefix("=last ")
    state: State | None = status.get("state")
    started: Any = status.get("started")
    if about.id != name or not name.isalnum() or state is None or state not in _TOLD:
        raise ValueError(name)
    if type(started) not in (int, float) or not 0 <= started < _LATEST:
        raise ValueError("started")
    known: State = "lost" if state == "running" and alive != "yes" else state
    said: Any = status.get("failed")
    times = said if isinstance(said, dict) else {}
    failed = tuple((rank, times[str(rank)]) for rank in about.ranks if type(times.get(str(rank))) is float)
    return Part(
        host=host,
        about=about,
        state=known,
        started=float(started),
        last=last,
        gpus=gpus,
        files=tuple(parse(status.get("files"))),
        failed=failed,
    )


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("too deep") from None
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def stop(shell: Shell, run: str) -> None:
    """Terminates the run's agent on this host and waits until it has ended. Raises ScriptFailed."""
    shell.run(given(run=run) + _STOP)
