"""Examines hosts in parallel, over one connection each, and then the network between them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from skyfab.calls.image import Image
from skyfab.errors import AuthenticationRefused, HostKeyRefused, HostUnfit, PoolError, ProtocolError, SkyfabError
from skyfab.inspect.doctor import checks, measure, pairs
from skyfab.inspect.doctor.finding import EXAMINE, Finding, HostReport
from skyfab.inventory.host import Host
from skyfab.pool.compute import Compute
from skyfab.session.ask import Asker
from skyfab.session.question import Question, only

_MOST: Final = 128
"""With more hosts, only these are examined for what is between them."""
_QUICK: Final = 0.15
"""Seconds in which the bandwidth of a pair is measured."""
_ALL_PAIRS: Final = 9.0
"""Seconds for all pairs together, if speed is measured."""
_ROUNDS: Final = 3
"""Of pairs, in each of which at most one host has no part; all of them if speed is measured."""
_CLOCK: Final[Question[float]] = Question("survey.clock", lambda host, replies: float(only(replies)))


def examined(asker: Asker, *, measured: bool = False) -> list[Finding]:
    """The findings about hosts and pairs of them. With `measured`, also about their speed, within 15 s."""
    findings: list[Finding] = []
    for outcome in asker.each(lambda host: _report(asker, host)):
        if outcome.answer is None:
            findings.append(refused(outcome.host, outcome.error or SkyfabError("no response")))
        else:
            findings += checks.findings(outcome.answer)
    unusable = {one.host for one in findings if one.section == "login" and one.level == "failure"}
    able = [host for host in asker.hosts if host.name not in unusable]
    asked = asker.ask(measure.MEASURE, able) if measured else []
    rates = {outcome.host.name: outcome.answer for outcome in asked if outcome.answer is not None}
    between, speeds = _between(asker, able[:_MOST], measured=measured) if len(able) > 1 else ([], {})
    if measured:
        rates = {name: {**own, **measure.network(name, speeds)} for name, own in rates.items()}
        findings += _speeds(able, rates)
    return findings + between


def refused(host: Host, error: SkyfabError) -> Finding:
    """The finding for a host that could not be opened, or that answered nothing of use."""
    check = "reachability"
    if isinstance(error, HostKeyRefused):
        check = "host key"
    elif isinstance(error, AuthenticationRefused):
        check = "login"
    elif isinstance(error, (HostUnfit, ProtocolError)):
        check = "start"
    return Finding("login", check, host.name, "failure", error.message, error.hint or "")


def _report(asker: Asker, host: Host) -> HostReport:
    report = asker.ask_one(EXAMINE, host)
    asked = time.time()
    there = asker.ask_one(_CLOCK, host)
    answered = time.time()
    return replace(report, offset=(there - (asked + answered) / 2, (answered - asked) / 2))


def _speeds(hosts: Sequence[Host], rates: Mapping[str, measure.Rates]) -> list[Finding]:
    known = [host for host in hosts if rates.get(host.name)]
    found = measure.compared(rates, {host.name: measure.load(host) for host in known})
    for host in known:
        measure.remember(host, rates[host.name])
    return found


def _between(asker: Asker, hosts: Sequence[Host], *, measured: bool) -> tuple[list[Finding], dict[pairs.Pair, float]]:
    """The findings about the network, and the bytes per second of each pair.

    The hosts become a pool over the connections that they have. Those that cannot are left out.
    """
    nothing = Image(excludes=("*",))  # of the caller's project is sent
    pool = Compute(hosts, inventory=asker.inventory, image=nothing, workdir="temp", results="data", ui="none")
    try:
        with pool.over(asker):
            where, found = pairs.places(pool)
            names = [host.name for host in hosts]
            rounds = pairs.all_pairs(names)[: None if measured else _ROUNDS]
            seconds = min(0.5, _ALL_PAIRS / len(rounds)) if measured else _QUICK
            rates, failures = pairs.rates(pool, where, rounds, seconds)
    except SkyfabError as error:
        failed = [one for one in getattr(error, "exceptions", (error,)) if isinstance(one, SkyfabError)]
        lost = [_unexamined(one, hosts) for one in failed]
        others = [host for host in hosts if host.name not in {one.host for one in lost}]
        if isinstance(error, PoolError) and len(others) > 1:
            found, rates = _between(asker, others, measured=measured)
            return [*lost, *found], rates
        return lost, {}
    return [*found, *failures, *pairs.bandwidths(rates)], rates


def _unexamined(error: SkyfabError, hosts: Sequence[Host]) -> Finding:
    what = f"the network could not be examined: {error.message}"
    return Finding("network", "ports", error.host or hosts[0].name, "failure", what, error.hint or "")
