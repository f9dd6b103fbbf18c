"""Compares the measurements of hosts with each other and with earlier ones, which are kept on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

from skyfab._util import schema
from skyfab.env import facts_cache
from skyfab.inspect.doctor.finding import Finding
from skyfab.inspect.doctor.pairs import Pair
from skyfab.inspect.survey import LIMITS
from skyfab.inventory.host import Host
from skyfab.session.question import Question, only

Rates = Mapping[str, float]
"""By what was measured, as in ``memory``; more is faster."""

SECONDS: Final = 2.0
"""For each thing that is measured on a host."""
_SLOWER: Final = 0.7
"""A host that has less than this part of what others have is named."""
_ENOUGH: Final = 3
"""Earlier measurements of a host with which a new one is compared."""
_KEPT: Final = 10
"""Measurements of a host that are kept."""


MEASURE: Final = Question(
    "measure", lambda host, replies: schema.parse(dict[str, float], only(replies), LIMITS), {"seconds": SECONDS}
)
"""Asks a host for how fast it is."""


def network(host: str, pairs: Mapping[Pair, float]) -> dict[str, float]:
    """What a host has on the median of the pairs that it is in."""
    own = [rate for pair, rate in pairs.items() if host in pair]
    return {"network": median(own)} if own else {}


def compared(rates: Mapping[str, Rates], earlier: Mapping[str, Sequence[Rates]]) -> list[Finding]:
    """A finding for each host and thing; `earlier` has what was measured before, by host."""
    found = []
    for host, own in rates.items():
        for name, rate in own.items():
            peers = [other[name] for other in rates.values() if name in other]
            before = [past[name] for past in earlier.get(host, []) if name in past]
            found.append(_compared(host, name, rate, peers, before))
    return found


def _compared(host: str, name: str, rate: float, peers: list[float], before: list[float]) -> Finding:
    slower = []
    if len(peers) > 1 and rate < _SLOWER * median(peers):
        slower.append(f"{_shown(name, median(peers))} is the median of {len(peers)} hosts")
    if len(before) >= _ENOUGH and rate < _SLOWER * median(before):
        slower.append(f"{_shown(name, median(before))} is the median of {len(before)} earlier measurements")
    what = f"{name}: {_shown(name, rate)}"
    if not slower:
        return Finding("speed", "speed", host, "ok", what)
    fix = "is it in use, hot, or in another power mode? skyfab hosts; on the host: cpupower frequency-info"
    if name == "network":
        fix = "is it in use? else try another cable, port or interface"
    what = f"slower: {what}; {' and '.join(slower)}"
    return Finding("speed", "speed", host, "warning", what, fix)


def _shown(name: str, rate: float) -> str:
    if name == "network":
        return f"{rate * 8 / 1e6:,.0f} Mbit/s"
    return f"{rate / 1e9:,.1f} GB/s" if name == "memory" else f"{rate / 1e9:,.3g} GFlop/s"


# ---- what was measured before


def load(host: Host) -> Sequence[Rates]:
    """The oldest first."""
    return facts_cache.read(host, "measured", list[dict[str, float]]) or []


def remember(host: Host, rates: Rates) -> None:
    """Adds to what is kept."""
    facts_cache.store(host, "measured", [*load(host), dict(rates)][-_KEPT:])
