"""The state of detached runs, as their hosts answer it (skyfab.host.ask.runs)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple

from skyfab._util import schema
from skyfab.detached.written import Written
from skyfab.inventory.host import Host
from skyfab.session.ask import Question, Reply

State = Literal["running", "done", "failed", "stopped", "lost", "unreachable"]
_LATEST: Final = 1e11
"""An upper limit for plausible timestamps."""
_LIMITS: Final = schema.Limits(characters=2000, items=100_000)


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

    def __post_init__(self) -> None:
        """A host may send anything. Raises schema.Invalid."""
        for name, several in (("hosts", self.hosts), ("ranks", self.ranks)):
            if not several or len(set(several)) < len(several):
                raise schema.Invalid("expected distinct items", (name,))
        if not 0 <= self.place < len(self.hosts):
            raise schema.Invalid("out of range", ("place",))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Status:
    state: Literal["running", "done", "failed", "stopped"]
    started: float
    files: tuple[Written, ...] = ()
    failed: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What a host says of a run."""

    id: str
    alive: bool
    pool: str
    last: str
    about: About
    status: _Status


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
            usages = schema.parse(tuple[tuple[int | None, int | None], ...], reply.value["gpus"])
            gpus = tuple(Usage(*one) for one in usages)
            continue
        try:
            found.append(_part(host.name, schema.parse(_Answer, reply.value, _LIMITS)))
        except schema.Invalid:
            continue  # incomplete, or not written by skyfab
    return [replace(part, gpus=gpus) for part in found]


def _part(host: str, found: _Answer) -> Part:
    about, status = found.about, found.status
    if about.id != found.id or not about.id.isalnum() or not 0 <= status.started < _LATEST:
        raise schema.Invalid("not a run")
    return Part(
        host=host,
        about=about,
        state="lost" if status.state == "running" and not found.alive else status.state,
        started=status.started,
        pool=found.pool,
        last=found.last,
        files=status.files,
        failed=tuple((rank, status.failed[str(rank)]) for rank in about.ranks if str(rank) in status.failed),
    )
