"""`skyfab init`: writes an inventory.toml with the usable hosts of ssh_config and known_hosts."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from skyfab._util.hints import HINTS
from skyfab._util.sizes import counted
from skyfab.cli.command import Option, command
from skyfab.errors import HostKeyRefused, SkyfabError, UsageError
from skyfab.ui.terminal import clean, clean_lines, is_rich

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skyfab.inspect.survey import Survey
    from skyfab.inventory.host import Host
    from skyfab.inventory.inventory import Inventory
    from skyfab.session.ask import Outcome

_FILE: Final = "inventory.toml"


@command
def init(
    hosts: Annotated[
        str | None,
        Option("aliases of ssh_config, patterns or addresses", "HOSTS", plain=True),
    ] = None,
    yes: Annotated[bool, Option("do not ask: use all hosts, record keys, skip unusable hosts")] = False,
) -> int:
    """Write an inventory.toml with the hosts that you already log in to.

    Reads ssh_config and known_hosts, runs a function on every host, and asks at most three questions: which hosts to
    use, whether to record keys that ssh does not know yet, and whether to skip unusable hosts. Never changes
    an existing file. Exits with 3, and writes nothing, if no host can be used.

        skyfab init
        skyfab init 'gpu*' --yes
        skyfab init node1,node2
    """
    path = Path(_FILE)
    if os.path.lexists(path):
        raise UsageError(f"{path} already exists", hint="skyfab doctor checks its hosts")
    known = _known()
    chosen = _named(_chosen(known, hosts, yes=yes))
    outcomes = _greeted(chosen, known)
    # A key that differs from the one on record is for `skyfab trust --replace`.
    if strangers := [one.host for one in outcomes if isinstance(one.error, HostKeyRefused) and one.error.is_unknown]:
        again = _greeted(_recorded(strangers, yes=yes), known)
        by_name = {one.host.name: one for one in again}
        outcomes = [by_name.get(one.host.name, one) for one in outcomes]
    _show(outcomes)
    ready = [one.host for one in outcomes if one.error is None]
    if not ready:
        print("no usable host: nothing was written", file=sys.stderr)
        return 3
    kept = ready if len(ready) == len(outcomes) or _left_out(outcomes, yes=yes) else [one.host for one in outcomes]
    found = replace(known, hosts={host.name: host for host in kept}, groups={})
    try:
        with path.open("x", encoding="utf-8") as file:  # never over a file that has come meanwhile
            file.write(found.to_toml())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", hint="cd into another folder") from None
    print(f"wrote {path} with {counted(len(kept), 'host')}")
    print(HINTS.adapted("next: skyfab doctor"))
    return 0


# ---- which hosts


def _known() -> Inventory:
    """The aliases of ssh_config, if any. Other names and addresses can be selected, too."""
    from skyfab.inventory.inventory import Inventory

    try:
        found = Inventory.of("ssh_config")
    except SkyfabError as error:
        print(clean_lines(f"ssh_config: {error.message}"), file=sys.stderr)
        return Inventory(hosts={})
    for name, reason in found.left_out.items():
        print(clean(f"skipped {name}: {reason}", colour=False), file=sys.stderr)
    return replace(found, source=None)


def _named(hosts: Sequence[Host]) -> list[Host]:
    """The hosts with names that an inventory can have: an address with user or port cannot be a name there."""
    from skyfab.inventory.host import NAME

    found: dict[str, Host] = {}
    for host in hosts:
        name = host.name if NAME.fullmatch(host.name) else re.sub(r"[^\w.+]+", "-", host.destination).strip("-")
        if name in found and host.port:
            name = f"{name}-{host.port}"
        while name in found:
            name = f"{name}-{len(found)}"
        found[name] = host if name == host.name else replace(host, name=name, address=host.destination)
    return list(found.values())


def _chosen(known: Inventory, hosts: str | None, *, yes: bool) -> tuple[Host, ...]:
    """Those that were named; else asks. Without aliases in ssh_config, those of known_hosts are offered."""
    from skyfab.inventory.selection import some
    from skyfab.inventory.ssh_config import known_hosts
    from skyfab.ui.prompt import answer

    if hosts is not None:
        return known.select(hosts)
    others = [name for name in known_hosts() if name not in known.hosts]
    offered = list(known.hosts) or others
    if not offered:
        what = "no host names in ssh_config or known_hosts; hashed names are not readable"
        raise UsageError(what, hint="name some: skyfab init ada@10.0.0.5,ada@10.0.0.6")
    where = "ssh_config" if known.hosts else "known_hosts"
    print(clean(f"{where} has {len(offered)}: {some(offered)}", colour=False))
    if known.hosts and others:
        print(clean(f"known_hosts also has {some(others)}", colour=False))
    given = "" if yes else answer("Which hosts? Names, patterns like gpu*, or all [all] ", "name them, or add --yes")
    choices = {host.name: host for host in known.select([*known.hosts, *others])}
    if given in ("", "all"):
        return known.select(offered)
    return replace(known, hosts=choices, source=Path(where)).select(given)  # a plain word that is not one is a typo


# ---- do they work


def _greeted(hosts: Sequence[Host], known: Inventory) -> list[Outcome[Survey]]:
    """Asks every host what it is, all at once."""
    from skyfab.cli.host_selection import asking
    from skyfab.inspect.survey import SURVEY

    with asking(hosts, known, show=is_rich(sys.stdout, sys.stderr)) as asker:
        return asker.ask(SURVEY)


def _recorded(hosts: list[Host], *, yes: bool) -> list[Host]:
    """Shows and records the keys of hosts; returns those that may be tried again."""
    from skyfab.cli.host_keys import record

    if not yes and not sys.stdin.isatty():
        raise UsageError("confirming host keys needs a terminal", hint="skyfab trust, or skyfab init --yes")
    try:
        return hosts if record(hosts, known_hosts=None, replace=False, yes=yes) else []
    except SkyfabError as error:  # of some: the others are recorded
        print(clean_lines(str(error)), file=sys.stderr)
        return hosts


def _show(outcomes: Sequence[Outcome[Survey]]) -> None:
    for one in outcomes:
        if one.answer is not None:
            now = one.answer
            gpus = f", {counted(len(now.gpus), 'GPU')}" if now.gpus else ""
            print(
                clean(f"{one.host.name}: hello from {now.os}, Python {now.python}, {now.cpus} CPUs{gpus}", colour=False)
            )
        elif one.error is not None:
            print(clean_lines(f"{one.host.name}: not usable: {one.error.message}"))
            if one.error.hint:
                print(HINTS.adapted(clean_lines(f"  hint: {one.error.hint}")))


def _left_out(outcomes: Sequence[Outcome[Survey]], *, yes: bool) -> bool:
    from skyfab.ui.prompt import answer

    count = sum(one.error is not None for one in outcomes)
    which = "the unusable host" if count == 1 else f"the {count} unusable hosts"
    return yes or answer(f"Skip {which}? [Y/n] ", "add --yes").lower() in ("", "y", "yes")
