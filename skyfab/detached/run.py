"""Detached runs: calls that outlive the program that made them. Their hosts keep what they write and return.

All that is known of a run lies in its folder on its hosts, and a plain shell there reads it: any machine with the
inventory finds it again. What is started is in `Compute.launch`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

from skyfab.calls.results import in_order, resolve
from skyfab.detached.folder import About, LogCursor, Part, State, look, new_lines, stop
from skyfab.detached.written import event
from skyfab.errors import BroadcastError, HostLost, SkyfabError, UsageError
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.protocol import messages
from skyfab.protocol.blobs import split
from skyfab.session.shell import ScriptFailed, Shell
from skyfab.session.shell_pool import PASSING, Shells
from skyfab.ui.events import FilesWritten

Results = Literal["any", "data"]
"""What is taken from hosts; ``"data"`` from those that are not trusted: see `Compute`."""
Trouble = Callable[[SkyfabError], None]
"""Told when a host stops answering while somebody waits for it; it is asked again until it answers."""
PACE: Final = 0.5
"""Seconds between looks."""
_MOMENT: Final = 10.0
"""Seconds that a look may take when time is up."""


class Run:
    """A run that its hosts have: its `id` and `name`, the names of its `hosts`, its `status`."""

    def __init__(
        self, parts: Sequence[Part], inventory: Inventory, hosts: Sequence[Host], results: Results = "any"
    ) -> None:
        """`hosts` are those that were asked; others of the run are looked up in the inventory, and nowhere else."""
        self._untrusted = results == "data"
        self._asked = {host.name: host for host in hosts}
        self._parts = list(parts)
        self._inventory = inventory
        self._about = about = parts[0].about
        self.id = about.id
        self.name = about.name
        self.function = about.function
        self.hosts = list(about.hosts)
        self.world_size = about.world
        self.started = min(part.started for part in parts)
        found = {part.about.place for part in parts}
        self.unasked = [
            name for place, name in enumerate(about.hosts) if place not in found and name not in self._asked
        ]
        """Its hosts that were not asked when it was last looked at: its state is that of the others."""

    def __repr__(self) -> str:
        return f"<run {self.id[:8]} {self.name}: {self.state}>"

    @property
    def parts(self) -> list[Part]:
        """As they were when it was last looked at."""
        return list(self._parts)

    @property
    def status(self) -> State:
        """How it stands now."""
        self.look()
        return self.state

    @property
    def state(self) -> State:
        """How it stood when it was last looked at."""
        return self._state_of(self._parts)

    def _state_of(self, parts: Sequence[Part]) -> State:
        states = {part.state for part in parts}
        if len(parts) < len(self.hosts) - len(self.unasked):
            states.add("unreachable")
        order: tuple[State, ...] = ("lost", "running", "unreachable", "stopped", "failed")
        return next((state for state in order if state in states), "done")

    def look(self) -> None:
        """Looks at all its hosts again; those that cannot be asked now may be later."""
        with self._shells() as shells:
            self._look(shells, [])

    def _look(self, shells: Shells, errors: list[SkyfabError]) -> list[Part]:
        parts = shells.ask(self._part, errors)
        self._parts, self.unasked = parts, []
        return parts

    def _part(self, shell: Shell) -> Part:
        found = look(shell, self.id)
        if found and found[0].about.id == self.id:
            return found[0]
        # It was there, so somebody has removed it: to wait for it would be to wait for ever.
        return Part(host=shell.host.name, about=self._about, state="lost", started=self.started)

    def _shells(self, **options: Any) -> Shells:
        return Shells([host for name in self.hosts if (host := self._host(name))], self._inventory, **options)

    def _all_shells(self, **options: Any) -> Shells:
        """Raises UsageError where a host of the run is neither one that was asked nor of the inventory."""
        unknown = [name for name in self.hosts if self._host(name) is None]
        if unknown:
            raise UsageError(
                f"run {self.id[:8]} is said to be on {', '.join(unknown)} too, which the inventory does not have",
                hint="name all of its hosts: --hosts=…, or hosts=… in attach()",
            )
        return self._shells(**options)

    def _host(self, name: str) -> Host | None:
        """One that was asked, or that the inventory has. A record is a host's word, which chooses no other logins."""
        return self._asked.get(name) or self._inventory.hosts.get(name)

    def files(self) -> list[FilesWritten]:
        """What it has written in working folders on other machines, as of the last look; empty until it is over."""
        found = []
        for part in self._parts:
            host = self._host(part.host)
            if host is None or host.transport == "local":
                continue
            found += [event(host, self._inventory, written) for written in part.files if _is_safe(written.workdir)]
        return found

    # ---- output

    def logs(
        self, *, follow: bool = False, rank: int | None = None, trouble: Trouble | None = None
    ) -> Iterator[tuple[int, str, str]]:
        """What its ranks have written, line by line: the rank, ``out`` or ``err``, the line.

        With `follow` until the run is over, whatever happens to connections; `trouble` is told of each that breaks.
        """
        tails: dict[tuple[str, str], LogCursor] = {}
        with self._all_shells(trouble=trouble if follow else None) as shells:
            if not follow:
                shells.ask(lambda shell: shell.run("true"))  # all log in at once
            while True:
                over = not follow or self._is_over(shells)
                for host in shells.hosts:
                    try:
                        with shells.on(host) as shell:
                            yield from new_lines(shell, self.id, rank, tails, rest=over)
                    except PASSING:
                        if not follow:
                            raise
                        over = False  # it may have more to say
                if over:
                    return
                time.sleep(PACE)

    def _is_over(self, shells: Shells) -> bool:
        errors: list[SkyfabError] = []
        state = self._state_of(self._look(shells, errors))
        _check(errors)
        return state not in ("running", "unreachable")

    # ---- its end

    def result(self, timeout: float | None = None, *, trouble: Trouble | None = None) -> Any:
        """Waits for its end, and returns what ``@`` or ``>>`` would have returned; raises what it has raised.

        Connections may break meanwhile; `trouble` is told. Raises TimeoutError, and HostLost where a host was started
        again.
        """
        until = float("inf") if timeout is None else time.monotonic() + timeout
        answers: dict[str, list[tuple[int, Any]]] = {}
        with self._all_shells(until=until + _MOMENT, trouble=trouble) as shells:
            while True:
                errors: list[SkyfabError] = []
                parts = self._look(shells, errors)
                state = self._state_of(parts)
                if state not in ("running", "unreachable"):
                    self._check_lost(parts)
                    shells.ask(lambda shell: self._fetch(shell, parts, answers), errors)  # noqa: B023
                    if not errors:
                        return self._conclude(parts[0].about, [one for some in answers.values() for one in some])
                if time.monotonic() > until:
                    why = f"cannot be asked: {errors[0]}" if errors else f"is still {state}"
                    raise TimeoutError(f"run {self.id[:8]} {why}")
                _check(errors)
                time.sleep(PACE)

    def _check_lost(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if part.state == "lost":
                raise HostLost(
                    f"its agent ended, it was started again, or somebody removed what it had of run {self.id[:8]}",
                    host=part.host,
                    hint=f"what it wrote until then: skyfab logs {self.id[:8]}",
                )

    def _fetch(self, shell: Shell, parts: Sequence[Part], answers: dict[str, list[tuple[int, Any]]]) -> None:
        """Adds what the ranks of a host have answered, unless it is there already."""
        host = shell.host.name
        if host in answers:
            return
        about = next(part.about for part in parts if part.host == host)
        found: list[tuple[int, Any]] = []
        for rank in about.ranks:
            place = rank if about.on == "all" else None
            try:
                content = memoryview(shell.read(f'"$c"/runs/{self.id}/result.{rank}'))
            except FileNotFoundError:
                text = f"rank {rank} of {self.function} was stopped, or had no room for its result"
                found.append((rank, _Failed(SkyfabError(text, host=host, rank=place))))
                continue
            try:
                size = int.from_bytes(content[:4], "big")
                message = messages.decode(bytes(content[4 : 4 + size]))
                buffers = split(getattr(message, "parts", ()), content[4 + size :])
                value = resolve(message, buffers, host=host, rank=place, label=self.function, untrusted=self._untrusted)
            except Exception as error:
                value = _Failed(error)
            found.append((rank, value))
        answers[host] = found
        with suppress(ScriptFailed):  # a disk that is full does not keep it from us
            shell.run(f'true >"$c"/runs/{self.id}/fetched')

    def _conclude(self, about: About, answers: list[tuple[int, Any]]) -> Any:
        values = [value for _, value in sorted(answers, key=lambda answer: answer[0])]
        failures = [value.error for value in values if isinstance(value, _Failed)]
        if about.on != "all":
            if failures:
                raise failures[0]
            return values[0]
        if failures:
            results = [value.error if isinstance(value, _Failed) else value for value in values]
            count = f"{len(failures)} of {len(values)} ranks"
            raise BroadcastError(f"{self.function} failed on {count}", failures, results)
        return in_order(values) if about.elastic else values

    def stop(self) -> None:
        """Ends its ranks on all hosts, and waits for that. What it wrote stays."""
        with self._all_shells() as shells:
            shells.ask(lambda shell: stop(shell, self.id))


def _is_safe(workdir: str) -> bool:
    """A host says what it likes, and this becomes a part of a command that people copy."""
    return re.fullmatch(r"[\w./~+-]+", workdir, re.ASCII) is not None


@dataclass(frozen=True, slots=True)
class _Failed:
    error: Exception


def _check(errors: Sequence[SkyfabError]) -> None:
    """Raises one that will not be over the next time."""
    for error in errors:
        if not isinstance(error, PASSING):
            raise error


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
                parts.setdefault(part.about.id, []).append(part)
    all_runs = [
        Run(sorted(some, key=lambda part: part.about.place), inventory, selected, results) for some in parts.values()
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
