"""`skyfab hosts`: shows address, Python, platform, CPUs, GPUs and state of each host."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from skyfab.cli.command import Hosts, InventoryFile, Json, command
from skyfab.errors import HostUnfit
from skyfab.ui.hints import HINTS
from skyfab.ui.terminal import clean_lines, is_rich

if TYPE_CHECKING:
    from skyfab.cli.fanout import Outcome
    from skyfab.protocol.messages import AgentHello


@command
def hosts(
    hosts: Hosts = None,
    inventory: InventoryFile = None,
    json_: Json = False,
) -> int:
    """Show what each host is, or why it cannot be used.

    Address, Python, platform, CPUs and GPUs, all hosts at once. Ends with 3 when one of them cannot be used.

        skyfab hosts
        skyfab hosts node1
        skyfab hosts --hosts=gpu --json
    """
    import json

    from skyfab.cli.fanout import fan_out
    from skyfab.cli.selected import selected
    from skyfab.ui.table import table

    known, chosen = selected(hosts, inventory, quiet=json_)
    show = not json_ and is_rich(sys.stdout, sys.stderr)  # else the table is enough
    outcomes = fan_out(lambda pool: pool.hosts[0].agent, chosen, known, show=show)
    found = [Facts.of(outcome) for outcome in outcomes]
    if json_:
        print(json.dumps([asdict(facts) for facts in found], indent=2, ensure_ascii=False))
    else:
        head = ("host", "address", "python", "platform", "CPUs", "GPUs", "state")
        table(head, [facts.row for facts in found], right=("CPUs", "GPUs"))
        for facts in found:
            if facts.hint:
                print(HINTS.adapted(clean_lines(f"hint: {facts.name}: {facts.hint}")), file=sys.stderr)
    return 0 if all(facts.error is None for facts in found) else 3


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
        if error is not None:
            reachable = isinstance(error, HostUnfit)
            return cls(name=host.name, address=address, reachable=reachable, error=error.message, hint=error.hint)
        assert agent is not None
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
