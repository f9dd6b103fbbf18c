"""Examines hosts: all at once, over one connection each, and then what is between them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from skyfab.calls.call import as_function
from skyfab.errors import ProtocolError, SkyfabError
from skyfab.host.ask.examine import examine
from skyfab.host.ask.speed import measure as measure_host
from skyfab.inspect.doctor import checks, measure, pairs
from skyfab.inspect.doctor.barrier import Meeting
from skyfab.inspect.doctor.finding import Finding
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.pool.compute import Compute
from skyfab.pool.each_host import ask, fan_out

_MOST: Final = 128
"""Hosts that meet. With more, only these are examined for what is between them."""
_QUICK: Final = 0.15
"""Seconds in which the bandwidth of a pair is measured."""


def examined(hosts: Sequence[Host], inventory: Inventory, *, show: bool, measured: bool = False) -> list[Finding]:
    """The findings about hosts and pairs of them. With `measured`, also about their speed, within 15 s."""
    between: list[Finding] = []
    speeds: dict[pairs.Pair, float] = {}

    def meet(pools: Mapping[str, Compute]) -> None:
        if len(pools) > 1:
            ordered = {host.name: pools[host.name] for host in hosts if host.name in pools}
            found, taken = _between(ordered, measured=measured)
            between.extend(found)
            speeds.update(taken)

    members = {host.name for host in hosts[:_MOST]}
    meeting = Meeting(len(members), meet)

    def work(pool: Compute) -> tuple[list[Finding], measure.Rates]:
        (node,) = pool.hosts
        asked = time.time()
        text = ask(pool, as_function(examine)(node.host.cache))
        found = checks.findings(checks.Patient.parse(node.host, text, asked, time.time()))
        rates = _measured(pool) if measured else {}
        if node.name in members:
            meeting.arrive(node.name, pool)
        return found, rates

    outcomes = fan_out(work, hosts, inventory, show=show, ended=lambda host: meeting.leave(host.name))
    findings = []
    rates: dict[str, measure.Rates] = {}
    for outcome in outcomes:
        if outcome.error is not None or outcome.result is None:
            findings.append(checks.refused(outcome.host, outcome.error or SkyfabError("no answer")))
            continue
        found, own = outcome.result
        findings += found
        rates[outcome.host.name] = {**own, **measure.network(outcome.host.name, speeds)}
    if measured:
        findings += _speeds(hosts, rates)
    return findings + between


def _measured(pool: Compute) -> measure.Rates:
    said = ask(pool, as_function(measure_host)(measure.SECONDS))
    try:
        return measure.parse(said)
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"what it measured is no table of numbers: {error}", host=pool.hosts[0].name) from None


def _speeds(hosts: Sequence[Host], rates: Mapping[str, measure.Rates]) -> list[Finding]:
    known = [host for host in hosts if rates.get(host.name)]
    found = measure.compared(rates, {host.name: measure.load(host) for host in known})
    for host in known:
        measure.remember(host, rates[host.name])
    return found


def _between(pools: Mapping[str, Compute], *, measured: bool) -> tuple[list[Finding], dict[pairs.Pair, float]]:
    """The findings about the network, and the bytes per second of each pair."""
    try:
        where, found = pairs.places(list(pools.values()))
        rounds = pairs.all_pairs(list(pools)) if measured else pairs.ring(list(pools))
        seconds = measure.pair_seconds(len(rounds)) if measured else _QUICK
        rates, failures = pairs.rates(pools, where, rounds, seconds)
    except SkyfabError as error:  # a host was lost meanwhile
        what = f"the network could not be examined: {error.message}"
        host = error.host or next(iter(pools))
        lost = Finding(section="network", check="ports", host=host, level="failure", what=what, fix=error.hint or "")
        return [lost], {}
    return [*found, *failures, *pairs.bandwidths(rates)], rates
