"""`skyfab hosts`: shows the hardware and state of each host: system, load, memory, disk, GPUs and who uses them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from skyfab._util.hints import HINTS
from skyfab.cli import report
from skyfab.cli.command import Hosts, InventoryFile, Json, Option, command
from skyfab.errors import HostUnfit, UsageError
from skyfab.ui.terminal import clean_lines, is_rich

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skyfab.inspect.survey import Survey
    from skyfab.session.ask import Outcome

_OPTIONAL: Final = ("system", "disk", "CPUs", "python", "load", "memory")
"""Columns that a narrow terminal does without, the first of them first."""


@command
def hosts(
    hosts: Hosts = None,
    inventory: InventoryFile = None,
    from_: Annotated[
        str | None,
        Option("list the hosts of a source, without connecting to them", "SOURCE"),
    ] = None,
    toml: Annotated[bool, Option("print the hosts of --from as an inventory.toml")] = False,
    json_: Json = False,
) -> int:
    """Show the hosts and what they are doing, or why they cannot be used.

    Shows system, Python, load, memory, disk, GPUs and who uses them. A narrow terminal shows
    fewer columns; --json has everything. Exits with 3 if a host cannot be used.

    A SOURCE is ssh_config, ssh_config:PATTERN, slurm, or the path of a hostfile, an Ansible inventory or an
    inventory.toml; hostfile:PATH and ansible:PATH name the kind. --inventory takes the same.

        skyfab hosts
        skyfab hosts node1
        skyfab hosts --hosts=gpu --json
        skyfab hosts --from=ssh_config --toml > inventory.toml
    """
    from skyfab.cli.host_selection import asking, selected
    from skyfab.inspect.survey import SURVEY

    if from_ is not None:
        if inventory is not None:
            raise UsageError("--from and --inventory cannot be combined", hint="use one of them")
        return _show_source(from_, hosts, as_toml=toml, as_json=json_)
    if toml:
        raise UsageError("--toml needs --from", hint="skyfab hosts --from=ssh_config --toml")
    known, chosen = selected(hosts, inventory, quiet=json_)
    show = not json_ and is_rich(sys.stdout, sys.stderr)  # else the table is enough
    with asking(chosen, known, show=show) as asker:
        found = [*map(Facts.of, asker.ask(SURVEY))]
    if json_:
        report.print_json(found)
    else:
        show_facts(found)
    return 0 if all(facts.error is None for facts in found) else 3


def show_facts(found: Sequence[Facts]) -> None:
    """Prints a table of hosts, and on stderr what helps where one cannot be used."""
    from skyfab.inspect.columns import NAMES

    rows = [("host", "address", *NAMES), *(facts.row for facts in found)]
    _print_table(rows, [facts.slots for facts in found], right=("slots", "CPUs", "load"), optional=_OPTIONAL)
    for facts in found:
        if facts.hint:
            print(HINTS.adapted(clean_lines(f"hint: {facts.name}: {facts.hint}")), file=sys.stderr)


def _show_source(source: str, hosts: str | None, *, as_toml: bool, as_json: bool) -> int:
    """Shows the hosts of a source, and on stderr what was skipped."""
    from skyfab.inventory.inventory import Inventory

    found = Inventory.of(source)
    if as_toml and (hosts is not None or as_json):
        raise UsageError("--toml cannot be combined with hosts or --json", hint="skyfab hosts --from=SOURCE --toml")
    groups = {name: [group for group, members in found.groups.items() if name in members] for name in found.hosts}
    chosen = found.select(hosts)
    for name, reason in found.left_out.items():
        print(clean_lines(f"skipped {name}: {reason}"), file=sys.stderr)
    if as_toml:
        print(found.to_toml(), end="")
    elif as_json:
        report.print_json(
            [{"name": one.name, "address": one.place, "groups": groups.get(one.name, [])} for one in chosen]
        )
    else:
        rows = [(one.name, one.place, ", ".join(groups.get(one.name, []))) for one in chosen]
        _print_table([("host", "address", "groups"), *rows], [one.slots for one in chosen], right=("slots",))
    return 0


def _print_table(rows: Sequence[tuple[str, ...]], slots: Sequence[int], **options: Any) -> None:
    """Prints rows, of which the first has the titles; with a third column if a host has more than one slot."""
    from skyfab.ui.table import table

    if max(slots, default=1) > 1:
        cells = ("slots", *map(str, slots))
        rows = [(*row[:2], cell, *row[2:]) for row, cell in zip(rows, cells, strict=True)]
    table(rows[0], rows[1:], **options)


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
    slots: int = 1
    survey: Survey | None = None
    error: str | None = None
    hint: str | None = None

    @classmethod
    def of(cls, outcome: Outcome[Survey]) -> Facts:
        host, error, survey = outcome.host, outcome.error, outcome.answer
        address = host.place
        if survey is None:
            reachable = isinstance(error, HostUnfit)
            message, hint = (error.message, error.hint) if error else ("no response", None)
            return cls(name=host.name, address=address, reachable=reachable, slots=host.slots, error=message, hint=hint)
        return cls(
            name=host.name,
            address=address,
            reachable=True,
            python=".".join(survey.python.split(".")[:2]),
            platform=survey.platform,
            cpus=survey.cpus,
            gpus=survey.gpus_of(host),
            slots=host.slots,
            survey=survey,
        )

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of the table."""
        from skyfab.inspect.columns import NAMES, cells

        if self.survey is None:
            return (self.name, self.address, *["–"] * (len(NAMES) - 1), self.error or "")
        return (self.name, self.address, *cells(self.survey, self.gpus))
