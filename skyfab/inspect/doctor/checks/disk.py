"""The disk of the cache: its free space, and whether programs can run from it."""

from __future__ import annotations

from typing import Final

from skyfab._util import toml
from skyfab._util.sizes import readable
from skyfab.inspect.doctor.finding import Facts, Findings, HostReport

_LEAST: Final = 500_000_000
_ADVICE: Final = 10_000_000_000
"""Bytes that an environment with torch for CUDA takes, with its packages."""
_INODES: Final = 20_000
"""Files of one environment with torch."""


def check(report: HostReport) -> Findings:
    facts, free = report.facts, report.survey.disk_free or 0
    setting = _other_cache(facts, free)
    fix = f"cache = {setting[1]} in the inventory" if setting else "cache = … in the inventory names another folder"
    room = f"{readable(free)} free for {facts.cache}"
    if free < _ADVICE:
        clean = f"skyfab gc --hosts={report.host.name} --days=7; or {fix}"
        yield report.finding("disk", "disk", "failure" if free < _LEAST else "advice", f"only {room}", clean, setting)
    else:
        yield report.finding("disk", "disk", "ok", room)
    if facts.inodes and facts.inodes_free is not None and facts.inodes_free < _INODES:
        what = f"only {facts.inodes_free:,} more files (inodes) on the disk of {facts.cache}"
        yield report.finding("disk", "inodes", "warning", what, fix, setting)
    if facts.noexec:
        what = f"programs cannot run from {facts.cache} (noexec): environments do not work"
        yield report.finding("disk", "noexec", "failure", what, fix, setting)
    if facts.readonly:
        yield report.finding("disk", "read-only", "failure", f"{facts.cache} is read-only", fix, setting)
    if facts.networked:
        what = f"{facts.cache} is on {facts.filesystem}, a network file system: programs start slowly from it, "
        what += "and if the disk of its server is full, all hosts stop"
        yield report.finding("disk", "network disk", "advice", what, fix, setting)


def _other_cache(facts: Facts, free: int) -> tuple[str, str] | None:
    better = max(_ADVICE, 0 if facts.noexec or facts.networked or facts.readonly else 2 * free)
    if facts.other_cache is None or (facts.other_free or 0) < better:
        return None
    return "cache", toml.dumps(facts.other_cache)
