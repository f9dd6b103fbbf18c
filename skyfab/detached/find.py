"""Finds detached runs: asks hosts for their run folders, and puts together what belongs to one run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from skyfab._util.suggest import did_you_mean
from skyfab.detached.folder import Part, question
from skyfab.detached.noted import used_last
from skyfab.detached.run import Results, Run
from skyfab.errors import SkyfabError, UsageError
from skyfab.inventory.host import LOCAL, Host
from skyfab.inventory.inventory import Inventory
from skyfab.session.ask import Asker
from skyfab.ui.failure import install, left_running


def runs(
    hosts: str | Iterable[str | Host] | None = None,
    *,
    inventory: str | os.PathLike[str] | Inventory | None = None,
    results: Results = "any",
) -> list[Run]:
    """The runs on these `hosts`, the latest first; for None, on those of the `inventory` and this machine.

    With ``results="data"`` hosts are not trusted, as for `Compute`.
    Raises HostError if a host cannot be queried.
    """
    install()
    with _asker_of(Inventory.of(inventory), hosts) as asker:
        found, errors = survey(asker, results)
    if errors:
        raise errors[0]
    return found


def _asker_of(inventory: Inventory, hosts: str | Iterable[str | Host] | None) -> Asker:
    return Asker(inventory.select(["all", LOCAL.name] if hosts is None else hosts), inventory)


def survey(
    asker: Asker, results: Results = "any", enough: Callable[[list[Run]], bool] | None = None
) -> tuple[list[Run], list[SkyfabError]]:
    """The runs on all hosts that could be queried, and the errors of the others.

    With `enough`, hosts that take long are waited for only if it returns False for the runs of the others.
    """
    asker.soon = enough is not None
    outcomes = asker.ask(question(gpus=True))
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    parts = [part for outcome in outcomes for part in outcome.answer or ()]
    found = runs_of(parts, asker.inventory, asker.hosts, results)
    return survey(asker, results) if errors and enough is not None and not enough(found) else (found, errors)


def runs_of(found: Iterable[Part], inventory: Inventory, hosts: Sequence[Host], results: Results = "any") -> list[Run]:
    """The runs that these parts, which `hosts` have sent, belong to; the latest first."""
    parts: dict[str, list[Part]] = {}
    for part in found:
        parts.setdefault(part.about.id, []).append(part)
    all_runs = [
        Run(sorted(some, key=lambda part: part.about.place), inventory, hosts, results) for some in parts.values()
    ]
    return sorted(all_runs, key=lambda run: run.started, reverse=True)


def attach(
    id: str,  # noqa: A002
    hosts: str | Iterable[str | Host] | None = None,
    *,
    inventory: str | os.PathLike[str] | Inventory | None = None,
    results: Results = "any",
) -> Run:
    """The run with this name (of several, the newest that runs, else the newest), or whose ID begins with `id`.

    `hosts`, `inventory` and `results` are as for `Compute`; without `hosts`, those of the inventory and this machine.
    Raises UsageError if there is no such run, or if several IDs begin with `id`.
    """
    install()
    with attached(id, hosts, inventory=inventory, results=results) as run:
        return run


@contextmanager
def attached(
    id: str,  # noqa: A002
    hosts: Any,
    *,
    inventory: Any,
    results: Results = "any",
    soon: bool = False,
    suits: Callable[[Run], bool] = lambda run: True,
) -> Iterator[Run]:
    """As `attach`; connections stay open in the block. With `soon`, slow hosts are left out if others have the run.

    Of the runs with this name, only those count that `suits` accepts.
    """
    if not id:  # else it would be the beginning of every id
        raise UsageError("no run was named", hint="to list runs: skyfab runs")
    with _asker_of(Inventory.of(inventory), hosts) as asker:
        with left_running(id):  # it may just have been started
            run = _find(id, asker, results, suits, soon=soon, is_named=hosts is not None)
        run.asker = asker
        try:
            yield run
        finally:
            run.asker = None


def _find(
    id: str,  # noqa: A002
    asker: Asker,
    results: Results,
    suits: Callable[[Run], bool],
    *,
    soon: bool,
    is_named: bool,
) -> Run:
    def is_there(found: list[Run]) -> bool:
        return any(run.id.startswith(id) or (run.name == id and run.silent) for run in found)

    found, errors = survey(asker, results, is_there if soon else None)
    named = [run for run in found if (run.name == id or run.id[:8] == id) and suits(run)]
    if named:
        return next((run for run in named if run.state == "running"), named[0])
    by_id = [run for run in found if run.id.startswith(id)]
    if len(by_id) > 1:
        some = ", ".join(run.id[:8] for run in by_id[:4])
        raise UsageError(f"{len(by_id)} runs begin with {id!r}: {some}", hint="type more of the ID, or the name")
    for run in by_id:  # it is one
        run.others = [one for one in found if one is not run and one.state == "running"]
        return run
    if errors:
        raise errors[0]
    near = did_you_mean(id, [*(run.id[: max(8, len(id))] for run in found), *(run.name for run in found)])
    if other := used_last(asker.inventory):
        near = near or f"the last run used another inventory: the same command with --inventory={shlex.quote(other)}"
    if not is_named and asker.inventory.source is None:
        hint = near or "set SKYFAB_INVENTORY, or name its hosts: --hosts=…"
        raise UsageError(f"no run {id!r} on this machine (no inventory loaded)", hint=hint)
    where = "these hosts" if is_named else "the hosts of the inventory or on this machine"
    raise UsageError(f"no run {id!r} on {where}", hint=near or "to list runs: skyfab runs")
