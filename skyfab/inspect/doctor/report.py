"""Formats findings for people: sections with their state, and fixes; also without names, for an issue."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from skyfab._util.hints import HINTS
from skyfab._util.sizes import counted
from skyfab.errors import InventoryError
from skyfab.inspect.doctor.finding import LEVELS, SECTIONS, Finding, worst
from skyfab.inventory.file import bare
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.ui.terminal import clean

_IPV4: Final = r"\b[0-9]{1,3}(?:\.[0-9]{1,3}){3}\b"
_IPV6: Final = r"(?<![\w:])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?![\w:])"


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


# ---- for an issue


def pasted(
    findings: Sequence[Finding], hosts: Sequence[Host], inventory: Inventory, people: Iterable[str], version: str
) -> str:
    """A block for an issue, without names of hosts and users, addresses and home folders."""
    redact = Redaction(hosts, inventory, people)
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    found = [f"{redact(one.host)} {one.section}/{one.check} {one.level}: {redact(one.what)}" for one in findings]
    return "\n".join(["```", f"skyfab {version}, {system}, {sys.platform}", *found, "```"])


class Redaction:
    """Replaces private names and values. What a host prints itself may have more: read it before you post it."""

    def __init__(self, hosts: Sequence[Host], inventory: Inventory, people: Iterable[str]) -> None:
        """`hosts` are numbered; `people` are names of users."""
        jumps: list[Host] = []
        for host in hosts:
            with suppress(InventoryError):  # jump hosts that form a loop
                jumps += inventory.jump_chain(host)
        users = {*people, *(host.user or "" for host in (*hosts, *jumps))} - {"", "root"}
        self._words = dict.fromkeys(users, "[user]")
        for hop in jumps:
            self._words |= dict.fromkeys((hop.name, hop.destination), "[jump host]")
        for number, host in enumerate(hosts, 1):
            self._words |= dict.fromkeys((host.name, host.destination), f"host{number}")

    def __call__(self, text: str) -> str:
        text = clean(text, colour=False)
        for word in sorted(self._words, key=len, reverse=True):
            text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", self._words[word], text)
        text = re.sub(r"/(home|Users|export/home)/[^/\s'\"]+", r"/\1/[user]", text)
        return re.sub(f"{_IPV4}|{_IPV6}", "[address]", text)
