"""`Finding`: a result of the doctor: what was checked, its state, and the fix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

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
