"""Detached runs: calls that outlive the program that made them. Their hosts keep what they write and return.

All that is known of a run lies in its folder on its hosts, and a plain shell there reads it: any machine with the
inventory finds it again. What is started is in `Compute.launch`.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from skyfab.answers import resolve
from skyfab.elastic import in_order
from skyfab.errors import BroadcastError, HostLost, HostUnfit, SkyfabError, UsageError
from skyfab.inventory import Host, Inventory
from skyfab.launch import open_shell
from skyfab.protocol import messages
from skyfab.protocol.blobs import split
from skyfab.shell import ScriptFailed, Shell
from skyfab.transport import transport_for

T = TypeVar("T")
Results = Literal["any", "data"]
"""What is taken from hosts; ``"data"`` from those that are not trusted: see `Compute`."""
State = Literal["running", "done", "failed", "stopped", "lost", "unreachable"]
PACE: Final = 0.5
"""Seconds between looks."""
_CHUNK: Final = 1024 * 1024
_LOG: Final = re.compile(r"(\d{1,9}\.(?:out|err)(?:\.1)?) (\d{1,15})")
"""A log's name (its rank, its stream, ``.1`` for the file before the last) and size."""

_ALIVE: Final = """
alive() {
  read -r pid boot folder <"$1/agent" 2>/dev/null || return 1
  test "$boot" = "$(cat /proc/sys/kernel/random/boot_id 2>/dev/null || echo '?')" || return 1
  if test -d /proc/self; then test "$(readlink "/proc/$pid/cwd" 2>/dev/null)" = "$folder"
  else kill -0 "$pid" 2>/dev/null; fi
}
"""
_LOOK: Final = (
    _ALIVE
    + """
for d in "$c"/runs/*; do
  test -s "$d/about" || continue
  if alive "$d"; then a=yes; else a=no; fi
  echo "=run ${d##*/} $a"
  head -c 65536 "$d/about"; echo
  head -c 65536 "$d/status"; echo
  l=
  for f in $(cd "$d/logs" 2>/dev/null && ls -t); do
    l=$(tail -c 2000 "$d/logs/$f" | tr -d '\\000' | grep . | tail -n 1)
    test -z "$l" || break
  done
  printf '%s\\n' "$l"
done
nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader,nounits 2>/dev/null | sed 's/^/=gpu /'
true
"""
)
_STOP: Final = (
    _ALIVE
    + """
alive "$d" || exit 0
kill -TERM "$pid"
set -- 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20
for i; do alive "$d" || exit 0; sleep 0.5; done
echo "process $pid has not ended after 10 s; wait, or end it there: kill -9 $pid"
exit 1
"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one host has of a run."""

    host: str
    about: dict[str, Any]
    state: State
    started: float
    ranks: dict[int, str]
    last: str
    """The last line that a rank wrote there."""
    gpus: tuple[str, ...] = ()
    """For each GPU of the host how busy it is, in percent, and the megabytes in use."""


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
        found = _on_all(self._known(), self._inventory, _look, [])
        self._parts = [part for parts in found for part in parts if part.about["id"] == self.id]

    def _known(self) -> list[Host]:
        return [self._asked.get(name) or self._inventory.select([name])[0] for name in self.hosts]

    # ---- output

    def logs(self, *, follow: bool = False, rank: int | None = None) -> Iterator[tuple[int, str, str]]:
        """What its ranks have written, line by line: the rank, ``out`` or ``err``, the line.

        With `follow` until the run is over.
        """
        with ExitStack() as stack:
            shells = [
                stack.enter_context(open_shell(host, transport_for(host, self._inventory))) for host in self._known()
            ]
            tails: dict[tuple[int, str], _Tail] = {}
            while True:
                over = not follow or self.status not in ("running", "unreachable")
                for number, shell in enumerate(shells):
                    yield from _new_lines(shell, number, self.id, rank, tails, rest=over)
                if over:
                    return
                time.sleep(PACE)

    # ---- its end

    def result(self, timeout: float | None = None) -> Any:
        """Waits for its end, and returns what ``@`` or ``>>`` would have returned; raises what it has raised.

        Raises TimeoutError, and HostLost where a host was started again meanwhile.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (state := self.status) in ("running", "unreachable"):
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"run {self.id[:8]} is still {state}")
            time.sleep(PACE)
        lost = next((part for part in self._parts if part.state == "lost"), None)
        if lost is not None:
            raise HostLost(
                f"its agent ended, or it was started again, during run {self.id[:8]}",
                host=lost.host,
                hint=f"what it wrote until then: skyfab logs {self.id[:8]}",
            )
        answers = [answer for found in _on_all(self._known(), self._inventory, self._fetch) for answer in found]
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
                size = int.from_bytes(content[:4], "big")
                message = messages.decode(bytes(content[4 : 4 + size]))
                buffers = split(getattr(message, "parts", ()), content[4 + size :])
                value = resolve(message, buffers, host=host.name, rank=place, label=self.function, wary=self._wary)
            except FileNotFoundError:
                text = f"rank {rank} of {self.function} was stopped, or had no room for its result"
                value = _Failed(SkyfabError(text, host=host.name, rank=place))
            except Exception as error:
                value = _Failed(error)
            found.append((int(rank), value))
        shell.run(f'true >"$c"/runs/{self.id}/fetched')
        return found

    def stop(self) -> None:
        """Ends its ranks on all hosts, and waits for that. What it wrote stays."""
        _on_all(self._known(), self._inventory, lambda host, shell: shell.run(f'd="$c"/runs/{self.id}\n{_STOP}'))


@dataclass(frozen=True, slots=True)
class _Failed:
    error: Exception


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
    for found in _on_all(selected, inventory, _look, errors if patient else None):
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


def _on_all(
    hosts: Sequence[Host],
    inventory: Inventory,
    ask: Callable[[Host, Shell], T],
    errors: list[SkyfabError] | None = None,
) -> list[T]:
    """Asks every host at once. Raises the first failure, unless they are to be collected."""

    def one(host: Host) -> T | None:
        try:
            with open_shell(host, transport_for(host, inventory)) as shell:
                return ask(host, shell)
        except ScriptFailed as failed:
            said = failed.output.strip()[-400:] or f"exit code {failed.status}"
            error: SkyfabError = HostUnfit(f"its shell could not do it: {said}", host=host.name)
        except SkyfabError as unable:
            error = unable
        if errors is None:
            raise error
        errors.append(error)
        return None

    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        return [found for found in pool.map(one, hosts) if found is not None]


def _look(host: Host, shell: Shell) -> list[Part]:
    text = shell.run(_LOOK)
    gpus = tuple(line.removeprefix("=gpu ") for line in text.splitlines() if line.startswith("=gpu "))
    found = []
    for piece in text.split("=run ")[1:]:
        lines = piece.splitlines()
        try:
            name, alive = lines[0].split()
            about, status = json.loads(lines[1]), json.loads(lines[2])
            found.append(
                _part(host.name, name, alive == "yes", about, status, lines[3] if len(lines) > 3 else "", gpus)
            )
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            continue  # half-written, or not ours
    return found


def _part(
    host: str, name: str, alive: bool, about: dict[str, Any], status: dict[str, Any], last: str, gpus: tuple[str, ...]
) -> Part:
    state = status["state"]
    if about["id"] != name or not name.isalnum() or state not in ("running", "done", "failed", "stopped"):
        raise ValueError(name)
    about = {**about, "hosts": [str(one) for one in about["hosts"]], "ranks": [int(rank) for rank in about["ranks"]]}
    ranks = {int(rank): str(how) for rank, how in status["ranks"].items()}
    return Part(
        host=host,
        about=about,
        state="lost" if state == "running" and not alive else state,
        started=float(status["started"]),
        ranks=ranks,
        last=last,
        gpus=gpus,
    )


# ---- logs


class _Tail:
    """How far a log has been read."""

    def __init__(self) -> None:
        self.offset = 0
        self.rest = b""


def _new_lines(
    shell: Shell, number: int, run: str, only: int | None, tails: dict[tuple[int, str], _Tail], *, rest: bool
) -> Iterator[tuple[int, str, str]]:
    """The lines that have come to the logs on a host since the last time; with `rest` half ones too."""
    folder = f'"$c"/runs/{run}/logs'
    listed = shell.run(f'cd {folder} 2>/dev/null || exit 0; for f in *; do echo "$f $(wc -c <"$f")"; done').splitlines()
    sizes = {found[1]: int(found[2]) for line in listed if (found := _LOG.fullmatch(line))}
    for name in sorted(name for name in sizes if not name.endswith(".1")):
        rank, stream = name.split(".")
        if only is not None and int(rank) != only:
            continue
        tail = tails.setdefault((number, name), _Tail())
        pieces = [(name, sizes[name])]
        if sizes[name] < tail.offset or (not tail.offset and f"{name}.1" in sizes):
            pieces.insert(0, (f"{name}.1", sizes.get(f"{name}.1", 0)))  # another file was begun since
        for place, (file, size) in enumerate(pieces):
            if place:
                tail.offset = 0
            while tail.offset < size:
                data = bytes(shell.read(f"{folder}/{file}", tail.offset, min(_CHUNK, size - tail.offset)))
                if not data:
                    break
                tail.offset += len(data)
                *lines, tail.rest = (tail.rest + data).split(b"\n")
                yield from ((int(rank), stream, each.decode(errors="replace")) for each in lines)
        if rest and tail.rest:
            yield int(rank), stream, tail.rest.decode(errors="replace")
            tail.rest = b""
