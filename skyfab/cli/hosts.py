"""`skyfab hosts`: shows address, Python, platform, CPUs, GPUs and state of each host."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

from skyfab.cli.fanout import Outcome, fan_out, load
from skyfab.errors import HostUnfit, SkyfabError
from skyfab.protocol.messages import AgentHello
from skyfab.ui.screen import table
from skyfab.ui.terminal import clean_lines, is_rich


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One host, as `--json` prints it. Programs rely on the field names."""

    name: str
    address: str
    reachable: bool
    python: str | None = None
    platform: str | None = None
    cpus: int | None = None
    gpus: int | None = None
    error: str | None = None
    hint: str | None = None

    @classmethod
    def of(cls, outcome: Outcome[AgentHello]) -> Facts:
        host, agent, error = outcome.host, outcome.result, outcome.error
        address = "this machine" if host.transport == "local" else host.login
        if agent is None:
            assert isinstance(error, SkyfabError)
            reachable = isinstance(error, HostUnfit)
            return cls(name=host.name, address=address, reachable=reachable, error=error.message, hint=error.hint)
        return cls(
            name=host.name,
            address=address,
            reachable=True,
            python=agent.python,
            platform=agent.platform,
            cpus=agent.cpus,
            gpus=agent.gpus if host.gpus == "auto" else len(host.gpus),
        )

    @property
    def row(self) -> tuple[str, ...]:
        found = [self.python, self.platform, self.cpus, self.gpus]
        cells = ("–" if value is None else str(value) for value in found)
        return (self.name, self.address, *cells, self.error or "ready")


def hosts(selection: str | None, inventory: str | None, *, as_json: bool) -> int:
    """Prints facts about the hosts; returns 3 if one of them cannot be used, else 0."""
    show = not as_json and is_rich(sys.stdout, sys.stderr)  # else the table is enough
    outcomes = fan_out(lambda pool: pool.hosts[0].agent, selection, load(inventory), show=show)
    found = [Facts.of(outcome) for outcome in outcomes]
    if as_json:
        print(json.dumps([asdict(facts) for facts in found], indent=2, ensure_ascii=False))
    else:
        head = ("host", "address", "python", "platform", "CPUs", "GPUs", "state")
        table(head, [facts.row for facts in found], right=("CPUs", "GPUs"))
        for facts in found:
            if facts.hint:
                print(clean_lines(f"hint: {facts.name}: {facts.hint}"), file=sys.stderr)
    return 0 if all(facts.error is None for facts in found) else 3
