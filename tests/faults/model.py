"""A model of what a pool must do: random operations from several threads, and what may come of each of them.

Workers make calls and judge their outcomes. The world edits the project, kills agents, cuts cables, and closes pools
and opens them again; while it does, it excuses what may follow from that, and nothing else.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import cable
import model_calls as calls
from stage.threads import begin

import skyfab as sky
from skyfab.lab import LabHost

BOUND = 90.0
"""Seconds within which whatever was begun ends."""
ENOUGH = 30
"""Broken promises after which a run is given up."""

PROMISES = {
    "ends": "every call ends in good time",
    "value": "a call that nothing happened to returns its value",
    "innocent": "cancelling, timing out or losing one call never fails another",
    "cancel": "a call that was cancelled is cancelled, however often",
    "order": "all ranks run the broadcasts of a gang in one order",
    "code": "a call runs the code as it was when the call was made, or newer",
    "back": "a host that was lost is taken back",
    "close": "a pool closes and opens again",
    "left": "after closing nothing is left",
}


class Report:
    """The promises that were broken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, list[str]] = {}
        self.done: Counter[str] = Counter()
        """Operations by kind."""
        self.trail: list[str] = []
        """What came before the first of them."""

    def broken(self, promise: str, what: str) -> None:
        with self._lock:
            self._found.setdefault(promise, []).append(what)

    def count(self) -> int:
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

    kind: Literal["lost", "closed"]
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
    machines: dict[str, LabHost]
    """Those hosts of it that are the lab's."""
    trail: deque[str] = field(default_factory=lambda: deque(maxlen=12))
    """What happened to it last: for whoever looks for the reason of a broken promise."""

    def note(self, what: str) -> None:
        self.trail.append(f"{time.monotonic() % 1000:7.3f} {what}")


@dataclass(slots=True, kw_only=True)
class Operation:
    """One call, and what may come of it."""

    kind: str
    pool: Pool
    right: Callable[[Any], bool]
    """Whether a result is what it must be."""
    host: str | None = None
    """The only host that it needs; None for any or all."""
    raises: tuple[type[BaseException], ...] = ()
    """What it may raise by itself."""
    must_raise: bool = False
    start: float = field(default_factory=time.monotonic)
    future: Future[Any] | None = None

    def __str__(self) -> str:
        return f"{self.kind} on {self.host or 'any host'} of {self.pool.name}"


class Model:
    """What is known of the pools, shared by all threads."""

    def __init__(self, pools: Sequence[Pool], code: Path, seed: int) -> None:
        self.pools = list(pools)
        self.seed = seed
        self.report = Report()
        self.stop = threading.Event()
        self.version = 0
        """Of the project's module, as a call that begins now must see it."""
        self.written = 0
        """The newest version that a call can have seen."""
        self.killed: set[str] = set()
        """Hosts whose agents were killed."""
        self._code = code
        self._windows: list[Window] = []
        self._numbers = iter(range(1, 1 << 60))
        self._lock = threading.Lock()
        self._orders: dict[tuple[str, str], dict[tuple[int, int], dict[int, int]]] = {}
        self.edit()

    def number(self) -> int:
        with self._lock:
            return next(self._numbers)

    def edit(self) -> None:
        self.written += 1
        new = self._code / ".new"
        new.write_text(f"version = {self.written}\n")
        new.replace(self._code / "edited_code.py")
        self.version = self.written

    # ---- excuses

    @contextlib.contextmanager
    def excused(self, kind: Literal["lost", "closed"], pool: Pool, host: str | None = None) -> Iterator[None]:
        window = Window(kind, pool, host, time.monotonic())
        pool.note(f"{kind} {host or ''}")
        with self._lock:
            self._windows.append(window)
        try:
            yield
        finally:
            pool.note(f"no longer {kind} {host or ''}")
            window.end = time.monotonic() + 3  # the ranks that wait for one that is gone are stopped after a while

    def _excuses(self, operation: Operation) -> set[str]:
        with self._lock:
            return {
                window.kind
                for window in self._windows
                if window.pool is operation.pool and window.end > operation.start
                if operation.host is None or window.host in (None, operation.host)
            }

    # ---- verdicts

    def judge(self, operation: Operation, value: Any, error: BaseException | None) -> None:
        self.report.done[operation.kind] += 1
        count = self.report.count()
        self._judge(operation, value, error, self._excuses(operation))
        how = "returned" if error is None else f"raised {', '.join(type(one).__name__ for one in _flat(error))}"
        operation.pool.note(f"{operation.kind} since {operation.start % 1000:.3f} {how}")
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

    def _judge(self, operation: Operation, value: Any, error: BaseException | None, excuses: set[str]) -> None:
        if error is None:
            if operation.must_raise and not excuses:
                self.report.broken("value", f"{operation} returned {value!r:.200} and raised nothing")
            elif not operation.right(value):
                self.report.broken("value", f"{operation} returned {value!r:.300}")
            return
        for one in _flat(error):
            if isinstance(one, operation.raises):
                continue
            if "closed" in excuses and isinstance(one, (sky.SkyfabError, CancelledError)):
                continue
            if "lost" in excuses and isinstance(one, (sky.HostError, sky.CallError)):
                continue
            innocent = isinstance(one, (sky.CallError, sky.HostError, CancelledError))
            self.report.broken("innocent" if innocent else "value", f"{operation} raised {one!r:.300}")
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


def _flat(error: BaseException) -> list[BaseException]:
    """The failures of a broadcast, or the one of another call."""
    if isinstance(error, (sky.BroadcastError, sky.PoolError)):
        return [inner for one in error.exceptions for inner in _flat(one)]
    return [error]


class Worker:
    """One thread that makes calls: some it waits for at once, others later."""

    def __init__(self, model: Model, number: int, operations: int) -> None:
        self._model = model
        self._random = random.Random(f"{model.seed} worker {number}")
        self._left = operations
        self._open: list[Operation] = []
        self.doing: Operation | None = None
        """What it waits for."""

    def run(self) -> None:
        kinds = list(_WEIGHTS)
        while self._left > 0 and not self._model.stop.is_set():
            self._left -= 1
            (kind,) = self._random.choices(kinds, [*_WEIGHTS.values()])
            getattr(self, f"_{kind}")(self._random.choice(self._model.pools))
            while len(self._open) > self._random.randrange(12):
                self._finish(self._open.pop(self._random.randrange(len(self._open))))
        while self._open:
            self._finish(self._open.pop())

    # ---- kinds of operations

    def _call(self, pool: Pool) -> None:
        number = self._model.number()
        self._now(self._operation("call", pool, 2 * number), lambda: calls.double(number) >> pool.compute)

    def _later(self, pool: Pool) -> None:
        number = self._model.number()
        seconds = self._random.choice([0.0, 0.0, 0.001, 0.02, 0.2])
        self._submit(self._operation("later", pool, 2 * number), calls.nap(number, seconds))

    def _named(self, pool: Pool) -> None:
        number = self._model.number()
        operation = self._operation("named", pool, 2 * number)
        operation.host = self._random.choice(pool.names)
        self._submit(operation, calls.double(number), on=operation.host)

    def _large(self, pool: Pool) -> None:
        content = self._random.randbytes(self._random.choice([40_000, 2_000_000]))
        self._submit(self._operation("large", pool, sha256(content).hexdigest()), calls.digest(content))

    def _failing(self, pool: Pool) -> None:
        operation = self._operation("failing", pool, None)
        operation.raises, operation.must_raise = (ArithmeticError,), True
        self._submit(operation, calls.fail(1), on=self._random.choice(["one", "all"]))

    def _map(self, pool: Pool) -> None:
        numbers = [self._model.number() for _ in range(self._random.choice([1, 5, 60]))]
        operation = self._operation("map", pool, [2 * number for number in numbers])
        self._now(operation, lambda: pool.compute.map(calls.double, numbers))

    def _broadcast(self, pool: Pool) -> None:
        operation, number = self._joining("broadcast", pool)
        self._now(operation, lambda: calls.join(number) @ pool.compute)

    def _broadcast_later(self, pool: Pool) -> None:
        operation, number = self._joining("broadcast later", pool)
        content = self._random.choice([b"", b"", b"", bytes(3_000_000)])
        self._submit(operation, calls.join(number, content, self._random.choice([0.0, 0.05])), on="all")

    def _cancel(self, pool: Pool) -> None:
        number = self._model.number()
        operation = self._operation("cancelled call", pool, 2 * number)
        function = self._random.choice([calls.nap, calls.save_and_return])
        self._submit(operation, function(number, self._random.choice([0.0, 0.01, 0.3, 60])))
        self._give_up(operation)

    def _cancel_broadcast(self, pool: Pool) -> None:
        operation, number = self._joining("cancelled broadcast", pool)
        self._submit(operation, calls.join(number, b"", self._random.choice([0.0, 0.1, 60])), on="all")
        self._give_up(operation)

    def _timeout(self, pool: Pool) -> None:
        number = self._model.number()
        function = self._random.choice([calls.limited_nap, calls.limited_save])
        on = self._random.choice(["one", "one", "one", "all"])
        expected = 2 * number if on == "one" else [2 * number] * pool.compute.world_size
        operation = self._operation("timeout", pool, expected)
        operation.raises = (sky.CallTimeout,)
        operation.must_raise = function is calls.limited_nap
        self._submit(operation, function(number, 60), on=on)

    def _impatient(self, pool: Pool) -> None:
        number = self._model.number()
        operation = self._operation("impatient", pool, 2 * number)
        self._submit(operation, calls.nap(number, 0.1))
        if operation.future is not None:
            with contextlib.suppress(Exception, CancelledError):
                operation.future.result(0.01)

    def _version(self, pool: Pool) -> None:
        least = self._model.version

        def right(found: Any) -> bool:
            if type(found) is int and not least <= found <= self._model.written:
                self._model.report.broken("code", f"{operation} ran version {found}, and {least} was written before")
            return type(found) is int

        operation = Operation(kind="version", pool=pool, right=right)
        self._now(operation, lambda: calls.version() >> pool.compute)

    # ---- their beginning and their end

    def _operation(self, kind: str, pool: Pool, expected: Any) -> Operation:
        return Operation(kind=kind, pool=pool, right=lambda found: bool(found == expected))

    def _joining(self, kind: str, pool: Pool) -> tuple[Operation, int]:
        number = self._model.number()

        def right(found: Any) -> bool:
            well = [part[:2] for part in found] == [(2 * number, rank) for rank in range(len(found))]
            if well:
                self._model.joined(pool, found)
            return well

        return Operation(kind=kind, pool=pool, right=right), number

    def _now(self, operation: Operation, work: Callable[[], Any]) -> None:
        self.doing = operation
        try:
            found = work()
        except Exception as error:
            self._model.judge(operation, None, error)
        else:
            self._model.judge(operation, found, None)
        finally:
            self.doing = None

    def _submit(self, operation: Operation, call: Any, on: str = "one") -> None:
        self.doing = operation
        try:
            operation.future = operation.pool.compute.submit(call, on=on)
        except Exception as error:
            self._model.judge(operation, None, error)
        else:
            self._open.append(operation)
        finally:
            self.doing = None

    def _give_up(self, operation: Operation) -> None:
        if operation.future is None:
            return
        operation.raises = (CancelledError,)
        time.sleep(self._random.choice([0.0, 0.0, 0.002, 0.05, 0.3]))
        for _ in range(self._random.choice([1, 1, 2])):
            try:
                if operation.future.cancel() and not operation.future.cancelled():
                    self._model.report.broken("cancel", f"{operation} was cancelled, and is not")
            except Exception as error:
                self._model.report.broken("cancel", f"{operation}.cancel() raised {error!r}")

    def _finish(self, operation: Operation) -> None:
        assert operation.future is not None
        self.doing = operation
        try:
            error = operation.future.exception(BOUND)
        except CancelledError as cancelled:
            error = cancelled
        except TimeoutError:
            self._model.late(operation, BOUND)
            return
        finally:
            self.doing = None
        self._model.judge(operation, None if error else operation.future.result(), error)


_WEIGHTS = {
    "call": 20,
    "later": 25,
    "named": 8,
    "large": 2,
    "failing": 4,
    "map": 4,
    "broadcast": 8,
    "broadcast_later": 8,
    "cancel": 10,
    "cancel_broadcast": 2,
    "timeout": 3,
    "impatient": 3,
    "version": 6,
}


class World:
    """What happens around the calls, one thing after another."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._random = random.Random(f"{model.seed} world")
        self.done: Counter[str] = Counter()

    def run(self) -> None:
        actions = ["edit", "edit", "cut", "edit", "lose", "edit", "cut", "reopen"]
        while True:
            self._random.shuffle(actions)
            for action in actions:
                if self._model.stop.wait(self._random.uniform(0.1, 1.5)):
                    return
                getattr(self, f"_{action}")(self._random.choice(self._model.pools))
                self.done[action] += 1

    def _edit(self, pool: Pool) -> None:
        self._model.edit()
        for each in self._model.pools:
            each.note(f"edited: version {self._model.version}")

    def _cut(self, pool: Pool) -> None:
        """Too short for anything to be lost."""
        if pool.machines:
            host = self._random.choice([*pool.machines.values()])
            cable.silence([host])
            self._model.stop.wait(self._random.uniform(0.05, 1.0))
            cable.restore([host])

    def _lose(self, pool: Pool) -> None:
        """Kills an agent: what runs on its host is lost, and the host comes back with another one."""
        name = self._random.choice(pool.names)
        (node,) = [node for node in pool.compute.hosts if node.name == name]
        before = node.agent.pid
        with self._model.excused("lost", pool, name):
            self._model.killed.add(name)
            _kill(pool.machines.get(name), before)
            end = time.monotonic() + BOUND
            while node.lost is not None or node.agent.pid == before:
                if time.monotonic() > end:
                    self._model.report.broken("back", f"{name} of {pool.name}: {node.lost}")
                    self._model.stop.set()
                    return
                time.sleep(0.02)

    def _reopen(self, pool: Pool) -> None:
        with self._model.excused("closed", pool):
            if not close(self._model, pool):
                return
            try:
                begin(pool.compute.open).result(BOUND)
            except Exception as error:
                self._model.report.broken("close", f"{pool.name} does not open again: {error!r}")
                self._model.stop.set()


def _kill(machine: LabHost | None, pid: int) -> None:
    if machine is not None:
        (pid,) = [process.outside for process in machine.processes() if process.pid == pid]
    os.kill(pid, 9)


def close(model: Model, pool: Pool) -> bool:
    try:
        begin(pool.compute.close).result(BOUND)
    except Exception as error:
        model.report.broken("close", f"{pool.name} does not close: {error!r}")
        model.stop.set()
        return False
    return True


def run(model: Model, *, operations: int, workers: int, seconds: float) -> None:
    """Runs so many operations, or for so long; then closes the pools."""
    crew = [Worker(model, number, operations // workers) for number in range(workers)]
    world = World(model)
    around = begin(world.run)
    working = [begin(worker.run) for worker in crew]
    end = time.monotonic() + seconds
    while not all(work.done() for work in working):
        late = time.monotonic() > end
        if late or model.report.count() > ENOUGH:
            model.stop.set()
        _look_for_hangs(model, crew)
        if time.monotonic() > end + 2 * BOUND or _is_over(model, crew):
            break
        time.sleep(0.05)
    model.stop.set()
    for work in (around, *(work for work in working if work.done())):
        work.result(2 * BOUND)
    for pool in model.pools:
        close(model, pool)
    model.judge_order()
    print(f"operations: {dict(model.report.done)}\nmeanwhile: {dict(world.done)}")


def _look_for_hangs(model: Model, crew: Sequence[Worker]) -> None:
    for worker in crew:
        operation = worker.doing
        if operation is not None and time.monotonic() > operation.start + 2 * BOUND and not model.stop.is_set():
            model.late(operation, 2 * BOUND)


def _is_over(model: Model, crew: Sequence[Worker]) -> bool:
    """Nothing more can be learnt: somebody hangs."""
    return model.stop.is_set() and any(
        worker.doing is not None and time.monotonic() > worker.doing.start + 2 * BOUND for worker in crew
    )
