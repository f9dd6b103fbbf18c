"""The network between hosts: whether they can connect to each other, on which interface, and how fast."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from skyfab._util import schema
from skyfab.calls.call import as_function
from skyfab.errors import PeersUnreachable, PoolError, SkyfabError
from skyfab.host.ask.measure import listen, send
from skyfab.inspect.doctor.finding import Finding
from skyfab.inspect.survey import LIMITS
from skyfab.inventory.host import Host
from skyfab.pool.addresses import Address, Candidates
from skyfab.pool.compute import Compute
from skyfab.pool.rendezvous import RendezvousFinder
from skyfab.session.fanout import Raised, for_each_host

Pair = tuple[str, str]
"""From one host to another, by name."""

_SLOW: Final = 12_500_000.0
"""Bytes per second: what a network of 100 Mbit/s carries."""
_BLOCKED: Final = "ranks on different hosts use TCP, on any port: open the firewall of the second host for the first"
_BEHIND: Final = 4.0
"""A pair is reported if it is this many times slower than the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """The answer of `send`."""

    rate: float = 0.0
    error: str = ""


def places(pool: Compute) -> tuple[dict[str, Address], list[Finding]]:
    """The address at which other hosts find each host, as for a gang; and what kept them from each other."""
    nodes = pool.hosts
    found: list[Finding] = []
    try:
        chosen: Sequence[Address] = RendezvousFinder("needed").arrange(nodes).addresses
    except (PeersUnreachable, PoolError) as error:
        errors = error.exceptions if isinstance(error, PoolError) else [error]
        found = [
            Finding("network", "ports", one.host or "", "failure", one.message, one.hint or "")
            for one in errors
            if isinstance(one, SkyfabError)
        ]
        chosen = Candidates(nodes).likely()
    by_name = {node.name: place for node, place in zip(nodes, chosen, strict=True)}
    if not found:
        candidates = Candidates(nodes)
        for node in nodes:
            others = {one.interface for one in candidates.of(node)} - {"", by_name[node.name].interface}
            found.append(_network(node.host, by_name[node.name], others))
    return by_name, found


def _network(host: Host, place: Address, others: set[str]) -> Finding:
    """Naming the interface saves the search, and keeps it the same when another one is added."""
    if others and place.interface and host.interface == "auto":
        what = f"it has several networks, and other hosts reach it on {place.interface}, not on {', '.join(others)}"
        setting = ("interface", f'"{place.interface}"')
        fix = f"if that is the right one: interface = {setting[1]} in the inventory"
        return Finding("network", "interface", host.name, "advice", what, fix, setting)
    return Finding("network", "interface", host.name, "ok", f"other hosts reach it at {place}")


def all_pairs(names: Sequence[str]) -> list[list[Pair]]:
    """Every host with every other once, in rounds in which no host has two parts (a tournament).

    >>> all_pairs(["a", "b", "c"])
    [[('b', 'c')], [('a', 'c')], [('a', 'b')]]
    """
    seats: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        couples = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        rounds.append([(one, other) for one, other in couples if one is not None and other is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [one for one in rounds if one]


def rates(
    pool: Compute, where: Mapping[str, Address], rounds: Sequence[Sequence[Pair]], seconds: float
) -> tuple[dict[Pair, float], list[Finding]]:
    """Bytes per second of each pair. Pairs of one round are measured at the same time."""
    word = secrets.token_hex(16)
    names = [node.name for node in pool.hosts]
    opened = for_each_host(lambda name: _port(pool, name, word, seconds), names)
    ports = {name: port for name, port in zip(names, opened, strict=True) if not isinstance(port, Raised)}

    def one_way(pair: Pair) -> _Sent:
        source, target = pair
        call = as_function(send)(where[target].address, ports[target], word)
        try:
            return schema.parse(_Sent, pool.submit(call, on=source).result(), LIMITS)
        except SkyfabError as error:
            return _Sent(error=error.message)
        except schema.Invalid as error:
            return _Sent(error=f"invalid reply: {error}")

    found: dict[Pair, float] = {}
    failures = []
    for pairs in rounds:
        known = [pair for pair in pairs if pair[0] in ports and pair[1] in ports]
        for pair, outcome in zip(known, for_each_host(one_way, known), strict=True):
            if isinstance(outcome, Raised):
                raise outcome.error
            if outcome.error:
                what = f"no data gets through: {outcome.error}"
                failures.append(Finding("network", "bandwidth", _shown(pair), "warning", what, _BLOCKED))
            else:
                found[pair] = outcome.rate
    return found, failures


def _port(pool: Compute, host: str, word: str, seconds: float) -> int:
    port = pool.submit(as_function(listen)(word, seconds), on=host).result()
    if type(port) is not int or not 0 < port < 65536:
        raise SkyfabError("invalid reply: expected a port", host=host)
    return port


def _shown(pair: Pair) -> str:
    return " → ".join(pair)


def bandwidths(found: Mapping[Pair, float]) -> list[Finding]:
    """Names pairs that are much slower than the others, and those that are slow for any training."""
    usual = median(found.values()) if found else 0.0
    findings = []
    for pair, rate in found.items():
        shown = f"{rate * 8 / 1e6:,.0f} Mbit/s"
        fix = "check cable, port and interface (ethtool INTERFACE); another network: interface = … in the inventory"
        if rate * _BEHIND < usual:
            what = f"{shown}, while others have {usual * 8 / 1e6:,.0f}"
            findings.append(Finding("network", "bandwidth", _shown(pair), "warning", what, fix))
        elif rate < _SLOW:
            what = f"{shown}: slow for the gradients of a large model"
            findings.append(Finding("network", "bandwidth", _shown(pair), "advice", what, fix))
        else:
            findings.append(Finding("network", "bandwidth", _shown(pair), "ok", shown))
    return findings
