"""Detached runs: calls that outlive the program that made them. Their hosts keep what they write and return.

All that is known of a run lies in its folder on its hosts, and a plain shell there reads it: any machine with the
inventory finds it again. What is started is in `Compute.launch`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from skyfab.answers import resolve
from skyfab.elastic import in_order
from skyfab.errors import BroadcastError, HostLost, SkyfabError, Unreachable, UsageError
from skyfab.inventory import Host, Inventory
from skyfab.protocol import messages
from skyfab.protocol.blobs import split
from skyfab.records import Part, State, Tail, look, new_lines, stop
from skyfab.shell import Shell
from skyfab.shells import Shells

Results = Literal["any", "data"]
"""What is taken from hosts; ``"data"`` from those that are not trusted: see `Compute`."""
PACE: Final = 0.5
"""Seconds between looks."""


class Run:
    """A run that its hosts have: its `id` and `name`, the names of its `hosts`, its `status`."""

    def __init__(
        self, parts: Sequence[Part], inventory: Inventory, hosts: Sequence[Host], results: Results = "any"
    ) -> None:
        """`hosts` are those that were asked; others of the run are looked up in the inventory."""
        self._wary = results == "data"
        self._asked = {host.name: host for host in hosts}
        self._parts = list(parts)
        self._inventory = inventory
        about = parts[0].about
        self.id: str = about["id"]
        self.name: str = about["name"]
        self.function: str = about["function"]
        self.hosts: list[str] = list(about["hosts"])
        self.world_size = int(about["world"])
        self.started = min(part.started for part in parts)
        self.trouble: Callable[[SkyfabError], None] | None = None
        """Told when a host stops answering while somebody waits for it; it is asked again until it does."""

    def __repr__(self) -> str:
        return f"<run {self.id[:8]} {self.name}: {self.state}>"

    @property
    def parts(self) -> list[Part]:
        """As they were when it was last looked at."""
        return self._parts

    @property
    def status(self) -> State:
        """How it stands now."""
        self.look()
        return self.state

    @property
    def state(self) -> State:
        """How it stood when it was last looked at."""
        states = {part.state for part in self._parts}
        if len(self._parts) < len(self.hosts):
            states.add("unreachable")
        order: tuple[State, ...] = ("lost", "running", "unreachable", "stopped", "failed")
        return next((state for state in order if state in states), "done")

    def look(self) -> None:
        """Looks at all its hosts again; those that cannot be asked now may be later."""
        with self._shells() as shells:
            self._look(shells)

    def _look(self, shells: Shells) -> list[SkyfabError]:
        errors: list[SkyfabError] = []
        found = shells.ask(lambda host, shell: look(host, shell, self.id), errors)
        self._parts = [part for parts in found for part in parts[:1] if part.about["id"] == self.id]
        return errors

    def _is_over(self, shells: Shells) -> bool:
        """Looks. Raises what will not get better by waiting."""
        _only_passing(self._look(shells))
        return self.state not in ("running", "unreachable")

    def _shells(self) -> Shells:
        hosts = [self._asked.get(name) or self._inventory.select([name])[0] for name in self.hosts]
        return Shells(hosts, self._inventory, self.trouble)

    # ---- output

    def logs(self, *, follow: bool = False, rank: int | None = None) -> Iterator[tuple[int, str, str]]:
        """What its ranks have written, line by line: the rank, ``out`` or ``err``, the line.

        With `follow` until the run is over, whatever happens to connections.
        """
        tails: dict[tuple[str, str], Tail] = {}
        with self._shells() as shells:
            while True:
                over = not follow or self._is_over(shells)
                for host in shells.hosts:
                    try:
                        with shells.on(host) as shell:
                            yield from new_lines(shell, self.id, rank, tails, rest=over)
                    except (HostLost, Unreachable):
                        if not follow:
                            raise
                        over = False  # it may have more to say
                if over:
                    return
                time.sleep(PACE)

    # ---- its end

    def result(self, timeout: float | None = None) -> Any:
        """Waits for its end, and returns what ``@`` or ``>>`` would have returned; raises what it has raised.

        Raises TimeoutError, and HostLost where a host was started again meanwhile.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._shells() as shells:
            while True:
                if self._is_over(shells):
                    self._check_lost()
                    errors: list[SkyfabError] = []
                    answers = [answer for found in shells.ask(self._fetch, errors) for answer in found]
                    if not _only_passing(errors):
                        return self._conclude(answers)
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"run {self.id[:8]} is still {self.state}")
                time.sleep(PACE)

    def _check_lost(self) -> None:
        lost = next((part for part in self._parts if part.state == "lost"), None)
        if lost is not None:
            raise HostLost(
                f"its agent ended, or it was started again, during run {self.id[:8]}",
                host=lost.host,
                hint=f"what it wrote until then: skyfab logs {self.id[:8]}",
            )

    def _conclude(self, answers: list[tuple[int, Any]]) -> Any:
        values = [value for _, value in sorted(answers, key=lambda answer: answer[0])]
        failures = [value.error for value in values if isinstance(value, _Failed)]
        about = self._parts[0].about
        if about["on"] != "all":
            if failures:
                raise failures[0]
            return values[0]
        if failures:
            results = [value.error if isinstance(value, _Failed) else value for value in values]
            count = f"{len(failures)} of {len(values)} ranks"
            raise BroadcastError(f"{self.function} failed on {count}", failures, results)
        return in_order(values) if about["elastic"] else values

    def _fetch(self, host: Host, shell: Shell) -> list[tuple[int, Any]]:
        part = next(part for part in self._parts if part.host == host.name)
        found: list[tuple[int, Any]] = []
        for rank in part.about["ranks"]:
            place = rank if part.about["on"] == "all" else None
            try:
                content = memoryview(shell.read(f'"$c"/runs/{self.id}/result.{int(rank)}'))
            except FileNotFoundError:
                text = f"rank {rank} of {self.function} was stopped, or had no room for its result"
                found.append((int(rank), _Failed(SkyfabError(text, host=host.name, rank=place))))
                continue
            try:
                size = int.from_bytes(content[:4], "big")
                message = messages.decode(bytes(content[4 : 4 + size]))
                buffers = split(getattr(message, "parts", ()), content[4 + size :])
                value = resolve(message, buffers, host=host.name, rank=place, label=self.function, wary=self._wary)
            except Exception as error:
                value = _Failed(error)
            found.append((int(rank), value))
        shell.run(f'true >"$c"/runs/{self.id}/fetched')
        return found

    def stop(self) -> None:
        """Ends its ranks on all hosts, and waits for that. What it wrote stays."""
        with self._shells() as shells:
            shells.ask(lambda host, shell: stop(shell, self.id))


@dataclass(frozen=True, slots=True)
class _Failed:
    error: Exception


def _only_passing(errors: Sequence[SkyfabError]) -> bool:
    """There are some, and they may be over the next time. Raises one that will not."""
    for error in errors:
        if not isinstance(error, (HostLost, Unreachable)):
            raise error
    return bool(errors)


# ---- finding them


def runs(
    hosts: str | Iterable[str | Host] | None = None,
    *,
    inventory: str | os.PathLike[str] | Inventory | None = None,
    results: Results = "any",
) -> list[Run]:
    """The runs that the hosts of an inventory have, the latest first. Raises a HostError where one cannot be asked."""
    found, _ = survey(Inventory.of(inventory), hosts, patient=False, results=results)
    return found


def survey(
    inventory: Inventory,
    hosts: str | Iterable[str | Host] | None,
    *,
    patient: bool = True,
    results: Results = "any",
) -> tuple[list[Run], list[SkyfabError]]:
    """The runs of all hosts that could be asked, and what is wrong with the others: raised unless `patient`."""
    errors: list[SkyfabError] = []
    parts: dict[str, list[Part]] = {}
    selected = inventory.select(hosts)
    with Shells(selected, inventory) as shells:
        for found in shells.ask(look, errors if patient else None):
            for part in found:
                parts.setdefault(part.about["id"], []).append(part)
    all_runs = [
        Run(sorted(some, key=lambda part: int(part.about["place"])), inventory, selected, results)
        for some in parts.values()
    ]
    return sorted(all_runs, key=lambda run: run.started, reverse=True), errors


def attach(
    id: str,  # noqa: A002
    hosts: str | Iterable[str | Host] | None = None,
    *,
    inventory: str | os.PathLike[str] | Inventory | None = None,
    results: Results = "any",
) -> Run:
    """The run with this id, the beginning of one, or a name. Raises UsageError where there is none, or several."""
    found, errors = survey(Inventory.of(inventory), hosts, results=results)
    fitting = [run for run in found if run.id.startswith(id)] or [run for run in found if run.name == id]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        some = ", ".join(run.id[:8] for run in fitting[:4])
        raise UsageError(f"{len(fitting)} runs are called {id!r}: {some}", hint="give the id of one of them")
    if errors:
        raise errors[0]
    raise UsageError(f"no run {id!r} on these hosts", hint="skyfab runs lists them")
