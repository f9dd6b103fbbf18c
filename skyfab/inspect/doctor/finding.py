"""`Finding`: a result of the doctor: what was checked, its state, and the fix; `HostReport`: what a host has said."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from skyfab._util import schema
from skyfab.errors import HostUnfit
from skyfab.inspect.survey import LIMITS, Survey
from skyfab.inventory.host import Host
from skyfab.session.question import Question, Reply, only

Level = Literal["ok", "advice", "warning", "failure"]
LEVELS: Final[tuple[Level, ...]] = ("ok", "advice", "warning", "failure")
"""From fine to worst. Advice is about what works, and could be better."""
Section = Literal["login", "system", "disk", "GPUs", "network", "speed"]
SECTIONS: Final[tuple[Section, ...]] = ("login", "system", "disk", "GPUs", "network", "speed")


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found in one place. `--json` prints it: programs rely on the field names."""

    section: Section
    check: str
    """What was looked at, in a word: the finding's heading in docs/doctor.md."""
    host: str
    """A host, or a pair of them as ``node1 → node2``."""
    level: Level
    what: str
    fix: str = ""
    setting: tuple[str, str] | None = None
    """A key of the host in the inventory and its value in TOML, which are the fix or part of it."""
    people: tuple[str, ...] = ()
    """Names of users in it, which an issue does not need."""


def worst(findings: Iterable[Finding]) -> Level:
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")


Findings = Iterator[Finding]
"""What a check yields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What `examine` has found on a host. None: unknown."""

    user: str
    cache: str | None = None
    filesystem: str | None = None
    networked: int | None = None
    noexec: int | None = None
    readonly: int | None = None
    inodes: int | None = None
    inodes_free: int | None = None
    other_free: int | None = None
    other_cache: str | None = None
    name_seconds: float | None = None
    name_error: str | None = None
    reverse_seconds: float | None = None
    shell: str | None = None
    shell_seconds: float | None = None
    shell_said: str | None = None
    startups: int | None = None
    sessions: int | None = None
    files: int | None = None
    processes: int | None = None
    kills: int | None = None
    lingers: int | None = None


@dataclass(frozen=True, slots=True)
class HostReport:
    """A host with all that is known of it."""

    host: Host
    facts: Facts
    survey: Survey
    offset: tuple[float, float] = (0.0, 0.0)
    """Seconds that its clock is ahead of this machine's, and by how many that may be wrong."""

    def finding(
        self,
        section: Section,
        check: str,
        level: Level,
        what: str,
        fix: str = "",
        setting: tuple[str, str] | None = None,
    ) -> Finding:
        people = (self.facts.user, *(one.user for gpu in self.survey.gpus for one in gpu.processes if one.user))
        named = tuple(dict.fromkeys(name for name in people if name in what + fix))
        return Finding(section, check, self.host.name, level, what, fix, setting, named)


def _parse(host: Host, replies: Iterator[Reply]) -> HostReport:
    found = only(replies)
    survey = found.pop("survey", None)
    if survey is None:
        hint = f"skyfab exec --hosts={host.name} -- nvidia-smi"
        raise HostUnfit("its system, disk or GPUs did not respond within 15 s", host=host.name, hint=hint)
    return HostReport(host, schema.parse(Facts, found, LIMITS), schema.parse(Survey, survey, LIMITS))


EXAMINE: Final = Question("examine", _parse)
"""Asks a host for all that can be checked on it."""
