"""What happens around the operations of the model, and the run of all its threads.

Processes are killed by the pid that this machine has for them, and only those that the lab lists for its own hosts.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256

import cable
import model_calls as calls
from model import BOUND, ENOUGH, Kind, Model, Pool
from model_workers import Interrupted, Worker
from stage.threads import begin

import skyfab as sky
from skyfab.lab import LabHost
from skyfab.lab.process import LabProcess

EVENTS = {
    "edit": 8,
    "end_agent": 2,
    "end_zygote": 2,
    "end_worker": 3,
    "end_link": 3,
    "reboot": 1,
    "fill": 2,
    "reopen": 2,
}
CUTS = {"cut": 3, "long_cut": 1}


class World:
    """One thing after another, drawn from the seed."""

    def __init__(self, model: Model, name: str, weights: dict[str, int], pause: tuple[float, float]) -> None:
        self._model = model
        self._name = name
        self._weights = weights
        self._pause = pause
        self._random = model.random()
        self.done: Counter[str] = Counter()

    def run(self) -> None:
        number = 0
        while True:
            number += 1
            self._random = self._model.random(self._name, number)
            if self._model.stop.wait(self._random.uniform(*self._pause)):
                return
            (event,) = self._random.choices(list(self._weights), [*self._weights.values()])
            getattr(self, f"_{event}")(self._random.choice(self._model.pools))
            self.done[event] += 1

    # ---- the project, the pools

    def _edit(self, pool: Pool) -> None:
        self._model.edit()
        for each in self._model.pools:
            each.note(f"edited: version {self._model.version}")

    def _reopen(self, pool: Pool) -> None:
        with self._model.excused("closed", pool):
            if close(self._model, pool):
                self._open(pool)

    def _open(self, pool: Pool) -> None:
        """While the network is cut, it may take several attempts."""
        end = time.monotonic() + BOUND
        while True:
            began = time.monotonic()
            try:
                begin(pool.compute.open).result(BOUND)
                return
            except Exception as error:
                was_cut = self._model.was_cut(pool, began)
                if was_cut and isinstance(error, (sky.HostError, sky.PoolError)) and began < end:
                    continue
                self._model.report.broken("close", f"{pool.name} does not open again: {error!r}")
                self._model.stop.set()
                return

    # ---- the network

    def _cut(self, pool: Pool) -> None:
        self._cut_for(pool, self._random.uniform(0.05, 1.0))

    def _long_cut(self, pool: Pool) -> None:
        self._cut_for(pool, self._random.uniform(2.0, 8.0))

    def _cut_for(self, pool: Pool, seconds: float) -> None:
        """Too short for anything of a session to be lost."""
        silently = self._random.random() < 0.5
        if (host := self._machine(pool)) is None:
            return
        with _at(host), self._excused("cut", host):
            cable.silence([host]) if silently else host.cut()
            self._model.stop.wait(seconds)
            cable.restore([host])

    def _end_link(self, pool: Pool) -> None:
        """The process that sshd has started: a broken connection like any other."""
        if (host := self._machine(pool)) is not None:
            with _at(host), self._excused("cut", host):
                self._end(host, _is_link)
                time.sleep(0.5)

    # ---- processes of a host

    def _end_agent(self, pool: Pool) -> None:
        """What runs on its host is lost, and the host comes back with another one."""
        if (host := self._machine(pool)) is not None:
            with _at(host), self._excused("lost", host):
                self._model.killed.add(host.name)
                self._end(host, lambda one, parents: one.ppid == 1 and _is_ours(one))
                self._wait_for(host)

    def _end_zygote(self, pool: Pool) -> None:
        """Its ranks end, and another one is started."""

        def is_zygote(one: LabProcess, parents: dict[int, LabProcess]) -> bool:
            parent = parents.get(one.ppid)
            return _is_ours(one) and _is_ours(parent) and parent is not None and parent.ppid == 1

        if (host := self._machine(pool)) is not None:
            with _at(host), self._excused("died", host):
                self._end(host, is_zygote)
                time.sleep(1)

    def _end_worker(self, pool: Pool) -> None:
        def is_worker(one: LabProcess, parents: dict[int, LabProcess]) -> bool:
            parent = parents.get(one.ppid)
            above = parents.get(parent.ppid) if parent is not None else None
            return _is_ours(one) and _is_ours(parent) and above is not None and above.ppid == 1

        if (host := self._machine(pool)) is not None:
            with _at(host), self._excused("died", host):
                self._end(host, is_worker)
                time.sleep(0.5)

    def _end(self, host: LabHost, condition: Callable[[LabProcess, dict[int, LabProcess]], bool]) -> None:
        processes = sorted(host.processes(), key=lambda one: one.pid)
        parents = {one.pid: one for one in processes}
        found = [one for one in processes if condition(one, parents)]
        if found:
            with suppress(ProcessLookupError):
                os.kill(self._random.choice(found).outside, signal.SIGKILL)

    # ---- a whole host

    def _reboot(self, pool: Pool) -> None:
        if (host := self._machine(pool)) is None or pool.small_disk:
            return
        with _at(host), self._excused("lost", host):
            self._model.rebooted.add(host.name)
            host.reboot()
            cable.settle([host])
            self._wait_for(host)

    def _fill(self, pool: Pool) -> None:
        for each in self._model.pools:
            if not each.small_disk:
                continue
            (host,) = each.machines.values()
            with _at(host), self._excused("full", host):
                fill = f"cat /dev/zero >{each.small_disk}/fill"
                host.run(["sh", "-c", fill], check=False)
                self._model.stop.wait(self._random.uniform(0.5, 3.0))
                host.run(["rm", "-f", f"{each.small_disk}/fill"])
                time.sleep(0.5)

    # ---- helpers

    def _machine(self, pool: Pool) -> LabHost | None:
        return self._random.choice([*pool.machines.values()]) if pool.machines else None

    @contextmanager
    def _excused(self, kind: Kind, host: LabHost) -> Iterator[None]:
        (pool,) = [pool for pool in self._model.pools if host.name in pool.machines]
        with self._model.excused(kind, pool, host.name):
            yield

    def _wait_for(self, host: LabHost) -> None:
        """Until the pool has the host, with an agent that is alive."""
        (pool,) = [pool for pool in self._model.pools if host.name in pool.machines]
        (node,) = [node for node in pool.compute.hosts if node.name == host.name]
        end = time.monotonic() + BOUND
        while not self._is_back(pool, node, host):
            if time.monotonic() > end:
                self._model.report.broken("back", f"{host.name} of {pool.name}: {node.lost}")
                self._model.explain(pool)
                self._model.stop.set()
                return
            time.sleep(0.05)

    def _is_back(self, pool: Pool, node: sky.Node, host: LabHost) -> bool:
        """A call to the host says so: one that is lost and has not been noticed yet does not answer."""
        if node.lost is not None:
            return False
        with suppress(sky.SkyfabError, TimeoutError):
            return begin(lambda: pool.compute.submit(calls.double(1), on=host.name).result(BOUND)).result(BOUND) == 2
        return False


_locks: dict[str, threading.RLock] = {}


def _at(host: LabHost) -> threading.RLock:
    """One thing at a time happens to a host's machine."""
    return _locks.setdefault(host.name, threading.RLock())


def _is_ours(process: LabProcess | None) -> bool:
    """Whether skyfab has started it: a link, an agent, a zygote or a worker."""
    return process is not None and process.cmdline[-1] in ("start", "resume")


def _is_link(one: LabProcess, parents: dict[int, LabProcess]) -> bool:
    """Its parent is the sshd of its login; that of an agent is the host's first process, which is an sshd too."""
    parent = parents.get(one.ppid)
    return _is_ours(one) and one.ppid != 1 and parent is not None and "sshd" in parent.cmdline[0]


def close(model: Model, pool: Pool) -> bool:
    try:
        begin(pool.compute.close).result(BOUND)
    except Exception as error:
        model.report.broken("close", f"{pool.name} does not close: {error!r}")
        model.stop.set()
        return False
    return True


def run(model: Model, *, workers: int, seconds: float) -> None:
    """Runs for that long; then all hosts are whole again, everything works, and the pools are closed."""
    main = Interrupted(model)
    crew = [main, *(Worker(model, f"worker{number}") for number in range(workers))]
    worlds = [
        World(model, "events", EVENTS, (0.1, 1.5)),
        World(model, "cuts", CUTS, (0.5, 3.0)),
    ]
    around = [begin(world.run) for world in worlds]
    watch = begin(lambda: _watch(model, crew, main, time.monotonic() + seconds))
    working = [begin(worker.run) for worker in crew[1:]]
    main.run()
    watch.result(3 * BOUND)
    for work in (*around, *working):
        try:
            work.result(3 * BOUND if not model.report.count() else 10)
        except TimeoutError:
            model.report.broken("ends", f"a thread does not: {[str(worker.doing) for worker in crew if worker.doing]}")
    cable.restore([host for pool in model.pools for host in pool.machines.values()])
    if not model.report.count():
        _works(model)
    for pool in model.pools:
        close(model, pool)
    model.judge_order()
    model.judge_notes()
    print(f"operations: {dict(sorted(model.report.done.items()))}\nsignals: {main.count}")
    for world in worlds:
        print(f"meanwhile: {dict(world.done)}")


def _watch(model: Model, crew: Sequence[Worker], main: Interrupted, end: float) -> None:
    """Ends the run in time, and sees who does not come back."""
    late = None
    while not model.stop.wait(0.2):
        if time.monotonic() > end or model.report.count() > ENOUGH:
            model.stop.set()
        for operation in (worker.doing for worker in crew):
            if operation is not None and time.monotonic() > operation.start + 2 * BOUND and late is None:
                late = operation
                model.late(operation, 2 * BOUND)
    patience = time.monotonic() + (2 * BOUND if late is None else 1)
    while main.is_running:
        if time.monotonic() > patience:
            if late is None and (late := main.doing) is not None:
                model.late(late, 2 * BOUND)
            main.give_up()
        time.sleep(0.2)


def _works(model: Model) -> None:
    """After all of it: each host answers, alone and in a gang."""
    chance = random.Random(model.seed)
    for pool in model.pools:
        number = chance.getrandbits(40)
        try:
            for name in pool.names:
                assert pool.compute.submit(calls.double(number), on=name).result(BOUND) == 2 * number
            parts = pool.compute.submit(calls.join(number), on="all").result(BOUND)
            assert [part[0] for part in parts] == [2 * number] * pool.compute.world_size
            _finish_uploads(model, pool)
            numbers = range(number, number + 40)
            assert pool.compute.map(calls.double, numbers) == [2 * one for one in numbers]
        except Exception as error:
            model.report.broken("back", f"{pool.name} does not work at the end: {error!r}")
            model.explain(pool)


def _finish_uploads(model: Model, pool: Pool) -> None:
    """An upload that was interrupted is completed by the next one, and leaves no part of a file."""
    for name in pool.machines:
        for file in model.folder.glob("contested?"):
            pool.compute.upload(file, to=f"shared/{file.name}", on=name)
            found = pool.compute.submit(calls.digest_of(f"shared/{file.name}"), on=name).result(BOUND)
            assert found == sha256(file.read_bytes()).hexdigest()
        left = pool.compute.submit(calls.parts("shared"), on=name).result(BOUND)
        assert not left, f"{name}: {left}"
