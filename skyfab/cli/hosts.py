"""`skyfab hosts`: shows address, Python, platform, CPUs, GPUs and state of each host."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

from skyfab.cli.command import Hosts, InventoryFile, Json, Option, command
from skyfab.errors import HostUnfit, UsageError
from skyfab.ui.hints import HINTS
from skyfab.ui.terminal import clean_lines, is_rich

if TYPE_CHECKING:
    from skyfab.cli.fanout import Outcome
    from skyfab.inventory.host import Host
    from skyfab.protocol.messages import AgentHello


@command
def hosts(
    hosts: Hosts = None,
    inventory: InventoryFile = None,
    from_: Annotated[
        str | None,
        Option("show what a source of hosts has, and connect to none of them", "SOURCE", example="ssh_config"),
    ] = None,
    toml: Annotated[bool, Option("print what --from shows as an inventory.toml")] = False,
    json_: Json = False,
) -> int:
    """Show what each host is, or why it cannot be used.

    Address, Python, platform, CPUs and GPUs, all hosts at once. Ends with 3 when one of them cannot be used.

    A SOURCE is ssh_config, ssh_config:PATTERN, slurm, or the path of a hostfile, an Ansible inventory or an
    inventory.toml; hostfile:PATH and ansible:PATH say which it is. --inventory takes the same.

        skyfab hosts
        skyfab hosts node1
        skyfab hosts --hosts=gpu --json
        skyfab hosts --from=ssh_config --toml > inventory.toml
    """
    from skyfab.cli.fanout import fan_out
    from skyfab.cli.selected import selected
    from skyfab.ui.table import table

    if from_ is not None:
        if inventory is not None:
            raise UsageError("--from and --inventory both say where hosts come from", hint="leave --from out")
        return _show_source(from_, hosts, as_toml=toml, as_json=json_)
    if toml:
        raise UsageError("--toml prints what --from shows", hint="skyfab hosts --from=ssh_config --toml")
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


def _show_source(source: str, hosts: str | None, *, as_toml: bool, as_json: bool) -> int:
    """Shows the hosts of a source, and on stderr what was left out."""
    from skyfab.inventory.inventory import Inventory
    from skyfab.ui.table import table

    found = Inventory.of(source)
    if as_toml and (hosts is not None or as_json):
        raise UsageError("--toml prints all hosts", hint="leave out the selection and --json")
    groups = {name: [group for group, members in found.groups.items() if name in members] for name in found.hosts}
    chosen = found.select(hosts)
    for name, reason in found.left_out.items():
        print(clean_lines(f"left out: {name}: {reason}"), file=sys.stderr)
    if as_toml:
        print(found.to_toml(), end="")
    elif as_json:
        listed = [{"name": one.name, "address": _address(one), "groups": groups.get(one.name, [])} for one in chosen]
        print(json.dumps(listed, indent=2, ensure_ascii=False))
    else:
        rows = [(one.name, _address(one), ", ".join(groups.get(one.name, []))) for one in chosen]
        table(("host", "address", "groups"), rows)
    return 0


def _address(host: Host) -> str:
    return "this machine" if host.transport == "local" else host.login


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
        address = _address(host)
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
