"""Formats findings for people: sections with their state, and fixes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from skyfab._util.hints import HINTS
from skyfab._util.sizes import counted
from skyfab.inspect.doctor.finding import LEVELS, SECTIONS, Finding, worst
from skyfab.inventory.file import bare
from skyfab.ui.terminal import clean


def lines(findings: Sequence[Finding], hosts: int, inventory: str = "inventory.toml") -> Iterator[str]:
    """The report: a line for each section that was examined, and below it what is not in order, the worst first.

    `inventory` is the file that settings belong in.
    """
    for section in SECTIONS:
        own = [finding for finding in findings if finding.section == section]
        if not own:
            continue
        yield f"{section:<8} {state(own)}"
        if section == "speed":  # it was asked for
            for host in dict.fromkeys(one.host for one in own if one.level == "ok"):
                measured = "; ".join(one.what for one in own if one.host == host and one.level == "ok")
                yield clean(f"  {host}: {measured}", colour=False)
        bad = [finding for finding in own if finding.level != "ok"]
        for (level, what, fix), alike in _alike(sorted(bad, key=lambda one: -LEVELS.index(one.level))):
            yield clean(f"  {level}: {', '.join(one.host for one in alike)}: {what}", colour=False)
            if fix:
                yield clean(f"    fix: {HINTS.adapted(fix)}", colour=False)
            for one in alike:
                if one.setting is not None:
                    line = f"[hosts.{bare(one.host)}] {' = '.join(one.setting)}"
                    yield clean(f"    in {inventory}: {line}", colour=False)
    yield f"{counted(hosts, 'host')}: {state(findings)}"


def _alike(findings: Iterable[Finding]) -> Iterable[tuple[tuple[str, str, str], list[Finding]]]:
    """What was found on several hosts is reported once."""
    found: dict[tuple[str, str, str], list[Finding]] = {}
    for one in findings:
        found.setdefault((one.level, one.what, one.fix), []).append(one)
    return found.items()


def state(findings: Sequence[Finding]) -> str:
    """``fine``, or how many there are of what is worse."""
    if worst(findings) == "ok":
        return "fine"
    counts = {level: sum(one.level == level for one in findings) for level in reversed(LEVELS[1:])}
    parts = [counted(n, "suggestion" if level == "advice" else level) for level, n in counts.items() if n]
    only_advice = worst(findings) == "advice"
    return f"fine, {parts[0]}" if only_advice else ", ".join(parts)


def exit_code(findings: Sequence[Finding]) -> int:
    """0: fine, or advice only; 1: a warning or failure; 3: a host cannot be used at all."""
    if any(one.section == "login" and one.level == "failure" for one in findings):
        return 3
    return 1 if worst(findings) in ("warning", "failure") else 0
