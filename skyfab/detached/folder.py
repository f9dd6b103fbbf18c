"""The state of detached runs, as their hosts answer it (skyfab.host.ask.runs)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, TypeVar

from skyfab.detached.written import Written, parse
from skyfab.inventory.host import Host
from skyfab.session.ask import Question, Reply

T = TypeVar("T")
State = Literal["running", "done", "failed", "stopped", "lost", "unreachable"]
_TOLD: Final[tuple[State, ...]] = ("running", "done", "failed", "stopped")
"""States that a host reports itself; the others are determined on this side."""
_LATEST: Final = 1e11
"""An upper limit for plausible timestamps."""
_LONGEST: Final = 2000
"""Characters of a line."""


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
    def parse(cls, said: Mapping[str, Any]) -> About:
        """Reads the description. Raises ValueError and TypeError: a host may send anything."""
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


class Usage(NamedTuple):
    """How busy a GPU is."""

    percent: int | None
    memory: int | None
    """Bytes in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The state of a run on one host."""

    host: str
    about: About
    state: State
    started: float
    pool: str = ""
    """The name of the pool that its workers belong to."""
    last: str = ""
    """The last line that a rank wrote on this host."""
    gpus: tuple[Usage, ...] = ()
    """Of each GPU of the host."""
    files: tuple[Written, ...] = ()
    """Files that it has written to persistent working folders; known once it has ended."""
    failed: tuple[tuple[int, float], ...] = ()
    """Ranks that have failed on this host, and when, by its clock."""


def question(run: str = "", *, ended: int | None = None, gpus: bool = False) -> Question[list[Part]]:
    """Asks for the state of all runs on a host, or of one. Of runs that have ended, only the last `ended`."""
    return Question("runs", _parse, {"run": run, "ended": ended, "gpus": gpus})


def _parse(host: Host, replies: Iterator[Reply]) -> list[Part]:
    found: list[Part] = []
    gpus: tuple[Usage, ...] = ()
    for reply in replies:
        if "gpus" in reply.value:
            gpus = tuple(_usage(*one) for one in reply.value["gpus"])
            continue
        try:
            found.append(_part(host.name, reply.value))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # incomplete, or not written by skyfab
    return [replace(part, gpus=gpus) for part in found]


def _usage(percent: object, used: object) -> Usage:
    numbers = [one if type(one) is int and 0 <= one < 2**50 else None for one in (percent, used)]
    return Usage(*numbers)


def _part(host: str, found: Mapping[str, Any]) -> Part:
    """Raises ValueError, KeyError, TypeError or AttributeError."""
    about, status = About.parse(found["about"]), found["status"]
    state: State | None = status.get("state")
    started: Any = status.get("started")
    if about.id != found["id"] or not about.id.isalnum() or state is None or state not in _TOLD:
        raise ValueError(about.id)
    if type(started) not in (int, float) or not 0 <= started < _LATEST:
        raise ValueError("started")
    said: Any = status.get("failed")
    times = said if isinstance(said, dict) else {}
    return Part(
        host=host,
        about=about,
        state="lost" if state == "running" and found["alive"] is not True else state,
        started=float(started),
        pool=str(found["pool"])[:_LONGEST],
        last=str(found["last"])[:_LONGEST],
        files=tuple(parse(status.get("files"))),
        failed=tuple((rank, times[str(rank)]) for rank in about.ranks if type(times.get(str(rank))) is float),
    )
