"""Detached runs: calls that outlive the program that started them; their hosts keep their output and results.

The whole state of a run is in a folder on its hosts and is asked for: any machine with the inventory
finds the run again. `Compute.launch` starts runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, Literal

from skyfab._util import schema
from skyfab._util.html import ShownAsTable
from skyfab.calls.results import in_order, unpack_result
from skyfab.detached.folder import Part, Phase, State, content_of, contradiction, question
from skyfab.detached.logs import LogLine, LogReader
from skyfab.detached.written import event, path_of
from skyfab.errors import HostLost, HostUnfit, ProtocolError, SkyfabError, UntrustedResult, UsageError, broadcast_error
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.protocol import messages
from skyfab.protocol.blobs import split
from skyfab.session.ask import PASSING, Asker, Outcome
from skyfab.session.fanout import one_error
from skyfab.session.question import Question, only
from skyfab.ui.events import FilesWritten
from skyfab.ui.failure import left_running
from skyfab.ui.suppressed import is_noise
from skyfab.ui.terminal import settled

Results = Literal["any", "data"]
"""What is accepted from hosts; ``"data"`` for hosts that are not trusted: see `Compute`."""
_Answers = dict[str, list[tuple[int, Any, Exception | None]]]
"""By host: each rank, what it has returned, and what it has raised."""
Trouble = Callable[[SkyfabError], None]
"""Called when a host stops responding while the caller waits for it; the host is retried until it responds."""
PACE: Final = 0.5
"""Seconds between polls."""
_MOMENT: Final = 10.0
"""Extra seconds for a query that is in progress when the timeout expires."""


class Run(ShownAsTable):
    """A run on its hosts: its `id` and `name`, the names of its `hosts`, its `status`."""

    def __init__(
        self, parts: Sequence[Part], inventory: Inventory, hosts: Sequence[Host], results: Results = "any"
    ) -> None:
        """`hosts` are those that were queried; other hosts of the run are looked up in the inventory only."""
        self._untrusted = results == "data"
        self._asked = {host.name: host for host in hosts}
        self._parts = list(parts)
        self._contradiction = contradiction(parts)
        self.inventory = inventory
        self._about = about = parts[0].about
        self.id = about.id
        self.name = about.name
        self.function = about.function
        renamed = {part.about.place: part.host for part in parts if part.host not in about.hosts}
        self.hosts = [name if self._host(name) else renamed.get(at, name) for at, name in enumerate(about.hosts)]
        self.world_size = about.world
        self.started = min(part.started for part in parts)
        found = {part.about.place for part in parts}
        self.unasked = [name for place, name in enumerate(self.hosts) if place not in found and name not in self._asked]
        """Hosts of the run that were not part of the last query: `state` does not include them."""
        self.asker: Asker | None = None
        """Whose connections are used, if they are open: see `attached`."""
        self.others: list[Run] = []
        """Other runs that were running when it was started."""

    def __repr__(self) -> str:
        return f"<run {self.id[:8]} {self.name}: {self.state}>"

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        return ("host", "state"), [(part.host, part.state) for part in self._parts]

    @property
    def parts(self) -> list[Part]:
        """The state on each host, as of the last query."""
        return list(self._parts)

    @property
    def status(self) -> State:
        """The current state; queries the hosts."""
        self.look()
        return self.state

    @property
    def state(self) -> State:
        """The state as of the last query, on the hosts that responded to it."""
        states = {part.state for part in self._parts} or {"unreachable"}
        order: tuple[State, ...] = ("running", "lost", "unreachable", "stopped", "failed")
        return next((state for state in order if state in states), "done")

    @property
    def silent(self) -> list[str]:
        """Hosts of the run that did not respond to the last query: `state` does not include them."""
        found = {part.about.place for part in self._parts}
        return [name for place, name in enumerate(self.hosts) if place not in found and name not in self.unasked]

    @property
    def last(self) -> str:
        """The last line that a rank wrote, as of the last query, without the start-up lines of frameworks."""
        lines = (part.last for part in self._parts)
        return settled(next((line for line in lines if line and not is_noise(line)), ""))[:200]

    @property
    def phase(self) -> Phase | None:
        """What it does while it is running: what its first host has noted that has noted anything."""
        return next((part.phase for part in self._parts if part.phase is not None and part.state == "running"), None)

    @property
    def error(self) -> str:
        """What the rank that failed first has raised, in one line; empty if that is not known."""
        errors = [(min(part.failed.values(), default=0.0), part.error) for part in self._parts if part.error]
        return min(errors)[1][:200] if errors else ""

    @property
    def summary(self) -> tuple[str, str]:
        """The state or phase, and the text that says most about it: for tables."""
        if self.state == "running" and (phase := self.phase) is not None:
            return phase.phase, phase.text or self.last
        return self.state, (self.error if self.state == "failed" else "") or self.last

    @property
    def failed(self) -> list[tuple[str, int]]:
        """Host and rank of each failure, in the order of time, as of the last query; then those that are lost."""
        found = sorted((moment, part.host, rank) for part in self._parts for rank, moment in part.failures)
        lost = [(0.0, part.host, rank) for part in self._parts if part.state == "lost" for rank in part.about.ranks]
        return list(dict.fromkeys((host, rank) for _, host, rank in (*found, *lost)))

    @property
    def has_ended(self) -> bool:
        """Whether all of its hosts responded to the last query, and none of them still runs it."""
        states = {part.state for part in self._parts}
        is_known = self._contradiction is None and len(self._parts) == len(self.hosts)
        return is_known and states.isdisjoint(("running", "unreachable"))

    def look(self) -> None:
        """Queries all its hosts again; those that are unreachable now may respond later. Raises ProtocolError."""
        with self._asker() as asker:
            self._look(asker)

    def _look(self, asker: Asker) -> list[SkyfabError]:
        """Returns the errors of the hosts that do not respond now."""
        outcomes = asker.ask(question(self.id))
        self._parts = [self._part(outcome) for outcome in outcomes if outcome.error is None]
        self._contradiction = contradiction(self._parts)
        self._check_parts()
        self.unasked = [name for name in self.hosts if self._host(name) is None]
        return [outcome.error for outcome in outcomes if outcome.error is not None]

    def _part(self, outcome: Outcome[list[Part]]) -> Part:
        found = outcome.answer
        if found and found[0].about.id == self.id:
            return found[0]
        # It was there before, so it has been deleted: waiting for it would never end.
        before = (part.about for part in self._parts if part.host == outcome.host.name)
        about = next(before, None) or replace(self._about, place=self.hosts.index(outcome.host.name))
        return Part(host=outcome.host.name, about=about, state="lost", started=self.started)

    def _asker(self, **options: Any) -> Asker:
        hosts = [host for name in self.hosts if (host := self._host(name))]
        return Asker(hosts, self.inventory, **options).sharing(self.asker)

    def _asker_of_all(self, **options: Any) -> Asker:
        """Raises UsageError if a host of the run was neither queried nor is in the inventory; and ProtocolError."""
        self._check_parts()
        if unknown := [name for name in self.hosts if self._host(name) is None]:
            raise UsageError(
                f"run {self.id[:8]} is also on {', '.join(unknown)}, which the inventory does not list",
                hint="name all of its hosts: --hosts=… (attach(hosts=…)); one that has a new name must respond",
            )
        return self._asker(**options)

    def _check_parts(self) -> None:
        if self._contradiction is not None:
            raise self._contradiction

    def _host(self, name: str) -> Host | None:
        """Only a queried host or one of the inventory: a host's report must not make this program log in elsewhere."""
        return self._asked.get(name) or self.inventory.hosts.get(name)

    def files(self) -> list[FilesWritten]:
        """Files written to working folders on other machines, as of the last query; empty until the run has ended."""
        found = []
        for part in self._parts:
            host = self._host(part.host)
            if host is None or host.is_here:
                continue
            found += [event(host, self.inventory, written) for written in part.files if written.is_safe]
        return found

    def in_workdirs(self) -> list[Host]:
        """Its hosts other than this machine, each with the working folder of the run, if that is kept."""
        found = [(part.about.workdir, self._host(part.host)) for part in self._parts]
        return [
            replace(host, workdir=path_of(host, workdir))
            for workdir, host in found
            if host is not None and workdir and not host.is_here
        ]

    # ---- output

    def logs(
        self, *, follow: bool = False, rank: int | None = None, trouble: Trouble | None = None
    ) -> Iterator[tuple[int, str, str]]:
        """The output of its ranks, or of `rank` alone, in the order of time: the rank, ``out`` or ``err``, the line.

        With `follow`, continues until the run has ended, across lost connections; `trouble` is called for each of them.
        Raises a HostError after the lines of the other hosts if one cannot be reached.
        """
        for line in self.lines(follow=follow, rank=rank, trouble=trouble):
            yield line.rank, line.stream, line.text

    def lines(
        self,
        *,
        follow: bool = False,
        rank: int | None = None,
        tail: int | None = None,
        since: float | None = None,
        trouble: Trouble | None = None,
        failed: Callable[[str, int], None] = lambda host, rank: None,
        stopped: Callable[[], bool] = lambda: False,
        soon: bool = False,
    ) -> Iterator[LogLine]:
        """Like `logs`, with times. Of earlier lines, only the last `tail`, and none from before `since`.

        `follow`, `rank` and `trouble` are as for `logs`; following ends early once `stopped` is true. `failed` is
        called once for each rank that has failed while others still run, with its host. With `soon`, what is known is
        yielded before hosts that take long are waited for.
        The times are those of the hosts' clocks, in seconds since 1970.
        Raises UsageError for a rank that the run does not have.
        """
        if rank is not None and not 0 <= rank < self.world_size:
            has = "one rank, 0" if self.world_size == 1 else f"ranks 0 to {self.world_size - 1}"
            raise UsageError(f"run {self.id[:8]} has no rank {rank}: it has {has}")
        with self._asker_of_all(trouble=trouble if follow else None) as asker:
            asker.soon = follow or soon
            reader = LogReader(asker, self.id, started=self.started, rank=rank, tail=tail, since=since)
            reported: set[tuple[str, int]] = set()
            while True:
                over = not follow or self._is_over(asker)
                for one in self.failed if self.state == "running" else ():
                    if one not in reported:
                        reported.add(one)
                        failed(*one)
                yield from reader.new(rest=over)
                if over and reader.errors and asker.soon:
                    asker.soon = False  # now that the lines of the others are shown
                    continue
                may_return = _check(reader.errors) and follow
                if over and reader.errors and not may_return:
                    raise one_error(reader.errors, len(asker.hosts))
                if (over and not reader.errors) or stopped():
                    return
                time.sleep(PACE)

    def _is_over(self, asker: Asker) -> bool:
        return not _check(self._look(asker)) and self.state not in ("running", "unreachable")

    # ---- result and stop

    def result(self, timeout: float | None = None, *, trouble: Trouble | None = None) -> Any:
        """Waits for the end, and returns what ``@`` or ``>>`` would have returned; raises what the run has raised.

        Lost connections are reopened; `trouble` is called for each. Raises TimeoutError after `timeout` seconds, and
        HostLost if a host was rebooted, or its agent or its folder of the run no longer exists.
        """
        until = float("inf") if timeout is None else time.monotonic() + timeout
        answers: _Answers = {}
        with left_running(self.id[:8]), self._asker_of_all(until=until + _MOMENT, trouble=trouble) as asker:
            while True:
                errors = self._look(asker)
                self._check_lost()  # first: ranks on other hosts may wait for those forever
                if self.state not in ("running", "unreachable") and not errors:
                    errors += self._fetch(asker, answers)
                    if not errors:
                        self._check_ranks(answers)
                        return self._conclude(answers)
                if time.monotonic() > until:
                    why = f"does not respond: {errors[0]}" if errors else f"is still {self.state}"
                    raise TimeoutError(f"run {self.id[:8]} {why}")
                _check(errors)
                time.sleep(PACE)

    def raise_failure(self) -> None:
        """Raises what the ranks have raised on the hosts that responded to the last query."""
        answers: _Answers = {}
        with self._asker() as asker:
            self._fetch(asker, answers)
        if answers:
            self._conclude(answers)

    def _check_lost(self) -> None:
        for part in self._parts:
            if part.state == "lost":
                raise HostLost(
                    f"its agent ended, the host was restarted, or the files of run {self.id[:8]} were removed",
                    host=part.host,
                    hint=f"its output until then: skyfab logs {self.id[:8]}",
                )

    def _check_ranks(self, answers: _Answers) -> None:
        """Raises ProtocolError if its hosts do not have the ranks that it has."""
        ranks = sorted(rank for some in answers.values() for rank, _, _ in some)
        if self._about.on == "all" and not self._about.elastic and ranks != [*range(self.world_size)]:
            which = f"{ranks[:20]} instead of those below {self.world_size}"
            raise ProtocolError(f"the hosts of run {self.id[:8]} report results of ranks {which}")

    def _fetch(self, asker: Asker, answers: _Answers) -> list[SkyfabError]:
        """Adds the results of hosts from which they were not fetched before. Returns the errors of those that fail."""
        parts = {part.host: part for part in self._parts if part.host not in answers}

        def fetch(host: Host) -> None:
            ranks = parts[host.name].about.ranks
            answers[host.name] = [(rank, *self._result(asker, host, rank)) for rank in ranks]
            with suppress(HostUnfit):  # a full disk must not make the fetch fail
                asker.ask_one(Question("runs.fetched", lambda host, replies: only(replies), {"run": self.id}), host)

        outcomes = asker.each(fetch, [host for host in asker.hosts if host.name in parts])
        return [outcome.error for outcome in outcomes if outcome.error is not None]

    def _result(self, asker: Asker, host: Host, rank: int) -> tuple[Any, Exception | None]:
        """What a rank has returned, and what it has raised."""
        place = rank if self._about.on == "all" else None
        found = asker.ask_one(Question("runs.content", content_of, {"run": self.id, "name": f"result.{rank}"}), host)
        if found is None:
            has_failed = (host.name, rank) in self.failed
            why = "its host was restarted, or its disk was full"
            what = f"ended without a result: {why}" if has_failed else "was stopped"
            return None, SkyfabError(f"rank {rank} of {self.function} {what}", host=host.name, rank=place)
        content = memoryview(found)
        try:
            size = int.from_bytes(content[:4], "big")
            message = messages.decode(bytes(content[4 : 4 + size]))
            buffers = split(getattr(message, "parts", ()), content[4 + size :])
            about: Any = {"host": host.name, "rank": place, "label": self.function}
            return unpack_result(message, buffers, **about, untrusted=self._untrusted), None
        except Exception as error:
            return None, error

    def _conclude(self, answers: _Answers) -> Any:
        moments = {rank: moment for part in self._parts for rank, moment in part.failures}
        found = sorted((one for some in answers.values() for one in some), key=lambda answer: answer[0])
        failed = sorted(found, key=lambda answer: moments.get(answer[0], float("inf")))
        failures = [error for _, _, error in failed if error is not None]
        failures = [one for one in failures if not isinstance(one, UntrustedResult)] or failures  # not a cause
        if failures and self._about.on == "all":
            raise broadcast_error(
                self.function, failures, [value if error is None else error for _, value, error in found]
            )
        if failures:
            raise failures[0]
        values = [value for _, value, _ in found]
        if self._about.on != "all":
            return values[0]
        return in_order(values) if self._about.elastic else values

    def stop(self) -> None:
        """Terminates its ranks on all hosts and waits until they have ended. Its output is kept."""
        with self._asker_of_all() as asker:
            asked = Question("runs.stop", lambda host, replies: schema.parse(int, only(replies) or 0), {"run": self.id})
            for outcome in asker.ask(asked):
                if pid := outcome.get():
                    what = f"process {pid} is still running after 10 s"
                    hint = f"wait, or on the host: kill -9 {pid}" if pid > 1 else None
                    raise HostUnfit(what, host=outcome.host.name, hint=hint)


def _check(errors: Sequence[SkyfabError]) -> bool:
    """Raises the first error that a retry cannot resolve. Returns whether a connection broke, and was not retried."""
    for error in errors:
        if not isinstance(error, PASSING):
            raise error
    return any(isinstance(error, HostLost) for error in errors)
