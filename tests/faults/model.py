"""A model of what a pool must do: random operations from several threads, and what may come of each of them.

`model_workers` makes calls, moves files, forwards ports, starts detached runs, uses devices. `model_world` edits the
project, cuts cables, kills processes, reboots hosts, fills a disk, and closes pools and opens them again. Meanwhile
this module excuses what docs/reliability.md says may follow, and nothing else.
"""

from __future__ import annotations

import contextlib
import faulthandler
import random
import re
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import skyfab as sky
from skyfab.lab import LabHost

BOUND = 90.0
"""Seconds within which whatever was begun ends."""
ENOUGH = 30
"""Broken promises after which a run is given up."""

PROMISES = {
    "ends": "every call ends in good time",
    "value": "a call that nothing happened to returns its value",
    "typed": "what may fail fails with the error that is documented for it",
    "innocent": "cancelling, timing out or losing one call never fails another",
    "once": "without retries a call runs at most once, and one that has returned has run",
    "cancel": "a call that was cancelled is cancelled, however often",
    "order": "all ranks run the broadcasts of a gang in one order",
    "code": "a call runs the code as it was when the call was made, or newer",
    "back": "a host that was lost is taken back",
    "close": "a pool closes and opens again",
    "left": "after closing nothing is left",
}

Kind = Literal["lost", "died", "cut", "full", "closed"]

EXCUSED: Mapping[Kind, tuple[type[BaseException], ...]] = {
    "lost": (sky.HostError, sky.CallError),  # the agent was killed, or the host rebooted
    "died": (sky.WorkerDied, sky.CallCancelled),  # a process was killed: its call, and the other ranks of a gang
    "cut": (),  # a session outlives its connection
    "full": (sky.HostUnfit, sky.WorkerDied, sky.CallCancelled),
    "closed": (sky.SkyfabError, CancelledError),
}
"""What any operation may raise because of what happens to its hosts meanwhile."""


class Stop(Exception):
    """What the handlers of signals raise."""


class Report:
    """The promises that were broken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, list[str]] = {}
        self.done: Counter[str] = Counter()
        """Operations by kind and outcome."""
        self.trail: list[str] = []
        """What came before the first of them."""

    def broken(self, promise: str, what: str) -> None:
        with self._lock:
            self._found.setdefault(promise, []).append(what)

    def count(self) -> int:
        with self._lock:
            return sum(map(len, self._found.values()))

    def __str__(self) -> str:
        lines = []
        for promise, found in sorted(self._found.items()):
            lines.append(f"broken {len(found)} times: {PROMISES[promise]}")
            lines += [f"    {what}" for what in found[:4]]
        return "\n".join([*lines, *self.trail])


@dataclass(slots=True)
class Window:
    """A time in which something is excused."""

    kind: Kind
    pool: Pool
    host: str | None
    start: float
    end: float = float("inf")


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """A pool of the model. `names` are those of its hosts."""

    name: str
    compute: sky.Compute
    names: tuple[str, ...]
    machines: Mapping[str, LabHost]
    """Those hosts of it that are the lab's."""
    has_torch: bool = False
    small_disk: str = ""
    """Where the disk is that may be filled; such a host is not rebooted, for it would lose the disk."""
    trail: deque[str] = field(default_factory=lambda: deque(maxlen=40))
    """What happened to it last: for whoever looks for the reason of a broken promise."""

    def note(self, what: str) -> None:
        self.trail.append(f"{time.monotonic() % 1000:7.3f} {what}")


@dataclass(slots=True, kw_only=True)
class Operation:
    """One operation, and what may come of it."""

    kind: str
    pool: Pool
    right: Callable[[Any], bool]
    """Whether a result is what it must be."""
    host: str | None = None
    """The only host that it needs; None for any or all."""
    raises: tuple[type[BaseException], ...] = ()
    """What it may raise by itself."""
    excused: Mapping[Kind, tuple[type[BaseException], ...]] = field(default_factory=dict)
    """What it may raise, beside what any operation may, because of what happens to its hosts."""
    must_raise: bool = False
    label: str = ""
    """Which of whose operations it is."""
    start: float = field(default_factory=time.monotonic)
    end: float = float("inf")
    future: Future[Any] | None = None

    def __str__(self) -> str:
        return f"{self.label}: {self.kind} on {self.host or 'any host'} of {self.pool.name}"


class Model:
    """What is known of the pools, shared by all threads."""

    def __init__(self, pools: Sequence[Pool], folder: Path, there: str, seed: int) -> None:
        """`folder` is this program's own, with the project's module in `code`; `there`, one that every host has."""
        self.pools = list(pools)
        self.folder = folder
        self.there = there
        self.seed = seed
        self.report = Report()
        self.stop = threading.Event()
        self.version = 0
        """Of the project's module, as a call that begins now must see it."""
        self.written = 0
        """The newest version that a call can have seen."""
        self.killed: set[str] = set()
        """Hosts whose agents were killed."""
        self.rebooted: set[str] = set()
        self.contents: dict[str, set[str]] = {}
        """The digests of what has been, or is being, uploaded under a name."""
        self.noted: dict[int, bool] = {}
        """The calls that leave a note on their host, and whether each has returned."""
        self._windows: list[Window] = []
        self._lock = threading.Lock()
        self._orders: dict[tuple[str, str], dict[tuple[int, int], dict[int, int]]] = {}
        self.edit()

    def random(self, *words: object) -> random.Random:
        """For one operation: it is the same for the same seed, whatever became of those before it."""
        return random.Random(" ".join(map(str, (self.seed, *words))))

    def edit(self) -> None:
        self.written += 1
        new = self.folder / "code/.new"
        new.write_text(f"version = {self.written}\n")
        new.replace(self.folder / "code/edited_code.py")
        self.version = self.written

    def uploads(self, name: str, digest: str) -> None:
        with self._lock:
            self.contents.setdefault(name, set()).add(digest)

    # ---- excuses

    @contextlib.contextmanager
    def excused(self, kind: Kind, pool: Pool, host: str | None = None) -> Iterator[None]:
        window = Window(kind, pool, host, time.monotonic())
        pool.note(f"{kind} {host or ''}")
        with self._lock:
            self._windows.append(window)
        try:
            yield
        finally:
            pool.note(f"no longer {kind} {host or ''}")
            window.end = time.monotonic() + 3  # the ranks that wait for one that is gone are stopped after a while

    def excuses(self, operation: Operation) -> set[Kind]:
        with self._lock:
            return {
                window.kind
                for window in self._windows
                if window.pool is operation.pool and window.start < operation.end and window.end > operation.start
                if operation.host is None or window.host in (None, operation.host)
            }

    def was_cut(self, pool: Pool, since: float) -> bool:
        with self._lock:
            return any(one.pool is pool and one.kind == "cut" and one.end > since for one in self._windows)

    # ---- verdicts

    def judge(self, operation: Operation, value: Any, error: BaseException | None) -> None:
        count = self.report.count()
        operation.end = min(operation.end, time.monotonic())
        self._judge(operation, value, error, self.excuses(operation))
        how = "returned" if error is None else f"raised {', '.join(type(one).__name__ for one in flat(error))}"
        self.report.done[f"{operation.kind} {how}"] += 1
        operation.pool.note(f"{operation} since {operation.start % 1000:.3f} {how}")
        if self.report.count() > count:
            self.explain(operation.pool)

    def explain(self, pool: Pool) -> None:
        """Keeps what happened before the first broken promise."""
        self.report.trail = self.report.trail or [f"before that, on {pool.name}:", *pool.trail]

    def late(self, operation: Operation, seconds: float) -> None:
        """It should have ended: where all threads are may tell why not."""
        self.report.broken("ends", f"{operation} has not ended after {seconds:.0f} s")
        self.explain(operation.pool)
        faulthandler.dump_traceback(sys.__stderr__)
        self.stop.set()

    def _judge(self, operation: Operation, value: Any, error: BaseException | None, excuses: set[Kind]) -> None:
        if error is None:
            if operation.must_raise and not excuses:
                self.report.broken("value", f"{operation} returned {value!r:.200} and raised nothing")
            elif not operation.right(value):
                self.report.broken("value", f"{operation} returned {value!r:.300}")
            return
        allowed = operation.raises
        for kind in excuses:
            allowed += EXCUSED[kind] + operation.excused.get(kind, ())
        for one in flat(error):
            if isinstance(one, allowed):
                continue
            promise = "innocent" if isinstance(one, (sky.CallError, sky.HostError, CancelledError)) else "typed"
            where = f" (excused: {', '.join(sorted(excuses)) or 'nothing'})"
            self.report.broken(promise, f"{operation} raised {one!r:.500}{where}{_trace(one)}")
            return

    def joined(self, pool: Pool, parts: Sequence[Any]) -> None:
        """Notes in which order the ranks of a broadcast have run it and those before it."""
        with self._lock:
            for _, rank, gang, pid, first, seen in parts:
                order = self._orders.setdefault((pool.name, gang), {}).setdefault((rank, pid), {})
                order.update(enumerate(seen, first))

    def judge_order(self) -> None:
        for (pool, gang), ranks in self._orders.items():
            orders = {who: [number for _, number in sorted(order.items())] for who, order in ranks.items()}
            (first, one), *others = orders.items()
            for second, other in others:
                common = set(one) & set(other)
                mine = [number for number in one if number in common]
                theirs = [number for number in other if number in common]
                if first[0] != second[0] and mine != theirs:
                    at = next(n for n, pair in enumerate(zip(mine, theirs, strict=True)) if len(set(pair)) > 1)
                    what = f"rank {first[0]} ran {mine[at : at + 4]}, rank {second[0]} {theirs[at : at + 4]}"
                    self.report.broken("order", f"{gang} of {pool}: {what}")

    def judge_notes(self) -> None:
        """What the hosts wrote down: each call once at most, and each that has returned."""
        hosts = {name: host for pool in self.pools for name, host in pool.machines.items()}
        found: Counter[int] = Counter()
        for host in hosts.values():
            file = host.path(f"{self.there}/notes")
            found.update(int(line) for line in (file.read_text().split() if file.exists() else ()))
        for number, returned in self.noted.items():
            if found[number] > 1 or (returned and not found[number]):
                self.report.broken("once", f"note {number} ran {found[number]} times, returned: {returned}")


def _trace(error: BaseException) -> str:
    """Where an error that nobody expected was raised."""
    frames = []
    step = error.__traceback__
    while step is not None:
        frames.append(f"{Path(step.tb_frame.f_code.co_filename).name}:{step.tb_lineno}")
        step = step.tb_next
    cause = f" from {error.__cause__!r:.1500}" if error.__cause__ else ""
    return f" at {' '.join(frames)}{cause}"


def is_all_but_noted(found: Sequence[str], expected: Sequence[str]) -> bool:
    """Whether the log of a run has all of these lines, except what it says that a full disk did not take."""
    text, rest = "".join(f"{line}\n" for line in found), "".join(f"{line}\n" for line in expected)
    for number, piece in enumerate(re.split(r"\[skyfab: the disk was full: (\d+) bytes .* missing here\]\n", text)):
        piece = rest[: int(piece)] if number % 2 else piece
        if not rest.startswith(piece):
            return False
        rest = rest[len(piece) :]
    return not rest


def flat(error: BaseException) -> list[BaseException]:
    """The failures of a broadcast, or the one of another call."""
    if isinstance(error, (sky.BroadcastError, sky.PoolError)):
        return [inner for one in error.exceptions for inner in flat(one)]
    return [error]
