"""The state of detached runs, as reported by their hosts (skyfab.host.ask.runs)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from skyfab._util import schema
from skyfab.detached.written import Written
from skyfab.errors import ProtocolError, printable
from skyfab.inventory.host import Host
from skyfab.session.question import Question, Reply

State = Literal["running", "done", "failed", "stopped", "lost", "unreachable"]
LATEST: Final = 1e11
"""An upper limit for plausible timestamps."""
_ID: Final = re.compile(r"[0-9A-Za-z]{1,64}")
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
        if not 0 <= min(self.ranks) <= max(self.ranks) < self.world:
            raise schema.Invalid("out of range", ("ranks",))
        if not all(map(str.isprintable, self.hosts)):
            raise schema.Invalid("expected printable names", ("hosts",))
        for name in ("name", "function"):  # a command may have several lines
            object.__setattr__(self, name, printable(getattr(self, name)))

    @property
    def common(self) -> tuple[object, ...]:
        """What is the same on all hosts of a run."""
        return self.name, self.function, self.hosts, self.world, self.on, self.elastic


@dataclass(frozen=True, slots=True)
class Usage:
    """How busy a GPU is."""

    percent: int | None
    memory: int | None
    """Bytes in use."""


@dataclass(frozen=True, slots=True)
class Phase:
    """What a run that is running does, as a rank has noted it (skyfab.host.phase)."""

    phase: Literal["waiting", "starting", "ready", "restarting", "giving way", "in use"]
    text: str
    """Details, for users."""
    since: float


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
    error: str = ""
    """What the first rank that failed on this host has raised."""
    phase: Phase | None = None
    """That of the first rank on this host that has noted one."""
    gpus: tuple[Usage, ...] | None = None
    """Of each GPU of the host; None if that was not asked."""
    files: tuple[Written, ...] = ()
    """Files that it has written to persistent working folders; known once it has ended."""
    failed: Mapping[str, float] = field(default_factory=dict)
    """When ranks have failed, by the host's clock: see `failures`."""

    def __post_init__(self) -> None:
        """A host may send anything. Raises schema.Invalid."""
        if not _ID.fullmatch(self.about.id) or not 0 <= self.started < LATEST:
            raise schema.Invalid("not a run")

    @property
    def failures(self) -> list[tuple[int, float]]:
        """Ranks that have failed on this host, and when."""
        return [(rank, self.failed[str(rank)]) for rank in self.about.ranks if str(rank) in self.failed]


def contradiction(parts: Sequence[Part]) -> ProtocolError | None:
    """The error if parts of a run contradict each other: a host could replace the results of others.

    Parts that are equal are those of a host that was asked by two names. The ranks of a lost one may be unknown.
    """
    places: dict[int, Part] = {}
    holders: dict[int, Part] = {}
    for part in parts:
        about, ranks = part.about, () if part.state == "lost" else part.about.ranks
        wrong = [parts[0]] if about.common != parts[0].about.common else []
        wrong += [one for one in [places.setdefault(about.place, part)] if one.about != about]
        wrong += [one for one in (holders.setdefault(rank, part) for rank in ranks) if one.about != about]
        if wrong:
            what = f"what it reports of run {about.id[:8]} contradicts what {wrong[0].host} reports"
            hint = "to use the run without one of them: --hosts=… (attach(hosts=…))"
            return ProtocolError(what, host=part.host, hint=hint)
    return None


def question(run: str = "", *, ended: int | None = None, gpus: bool = False) -> Question[list[Part]]:
    """Asks for the state of all runs on a host, or of one. Of runs that have ended, only the last `ended`."""
    return Question("runs", _parse, {"run": run, "ended": ended, "gpus": gpus})


def _parse(host: Host, replies: Iterator[Reply]) -> list[Part]:
    found: list[Part] = []
    gpus: tuple[Usage, ...] | None = None
    for reply in replies:
        if "gpus" in reply.value:
            gpus = schema.parse(tuple[Usage, ...], reply.value["gpus"])
            continue
        try:
            found.append(schema.parse(Part, {**reply.value, "host": host.name}, _LIMITS))
        except schema.Invalid:
            continue  # incomplete, or not written by skyfab
    return [replace(part, gpus=gpus) for part in found]


def content_of(_host: Host, replies: Iterator[Reply]) -> bytearray | None:
    """The content of a file; None if it is not there."""
    first = next(replies, None)
    if first is None or first.value is not True:
        return None
    content = bytearray()
    for reply in replies:
        content += reply.data
    return content
