"""What is simulated: a pool is opened, runs calls, loses hosts and is closed; and what must be true at every seed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import skyfab as sky
from simulation import functions
from simulation.host import Loss
from simulation.world import World
from skyfab._util.sizes import counted
from skyfab.errors import BroadcastError, CallCancelled, HostError, HostLost, PoolError
from skyfab.plugins.base import Elastic, Plugin
from skyfab.protocol.blobs import name_of
from skyfab.protocol.frames import HEAD, PING

LEASE: Final = 20.0
_SHARE: Final = 0.1
"""Of the hosts are lost."""
_ITEMS: Final = 3
"""Items of a map for each host."""
_PATIENCE: Final = 600.0
"""Simulated seconds after which a phase is stuck."""
_AWAY: Final = 5.0
"""Seconds that a host is away which returns: less than any limit after which it is given up."""
_RETRIES: Final = 20
_CONTENT: Final = 64 << 20
"""Bytes that a relay sends to each host; fewer in a small pool, which is a quick check."""
_LITTLE: Final = 16 << 20
_SMALL: Final = 200
"""Hosts of a small pool."""
_RELAYED: Final = (1, 16, 64)
"""Numbers of hosts of a relay."""
_SLOW_LINK: Final = 12_500_000.0
"""Bytes a second of each link in a relay: 100 Mbit/s."""
_LOSSES: Final[tuple[Loss, ...]] = ("killed", "off", "silent", "rebooted")


class Broken(AssertionError):
    """A promise was not kept."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one phase took."""

    name: str
    seconds: float
    """Simulated."""
    messages: int
    heartbeats: int
    bytes_out: int
    bytes_in: int
    logins: int
    cpu: float
    """Real seconds of CPU time of the client."""
    hosts_cpu: float
    """The same of all simulated hosts."""


class Elastically(Plugin):
    """Gangs that continue without lost hosts, as those of ``torch(elastic=…)`` do."""

    def __init__(self, least: int, most: int) -> None:
        self.elastic = Elastic(least, most, max_restarts=3)

    def __repr__(self) -> str:
        return f"Elastically({self.elastic.min_hosts}, {self.elastic.max_hosts})"


class Scenario:
    """One seed: the same calls without faults, then with them."""

    def __init__(self, hosts: int, seed: int, *, share: float = _SHARE) -> None:
        self.hosts = hosts
        self.seed = seed
        self.rows: list[Row] = []
        self.threads = 0
        self.connections = 0
        self.traces: list[str] = []
        self._content = _CONTENT if hosts >= _SMALL else _LITTLE
        self._lost = max(1, int(hosts * share)) if share else 0

    def run(self) -> None:
        """Runs all parts. Raises Broken, Stuck, and whatever the client raises that it should not."""
        self.without_faults()
        self.with_losses()
        self.elastic()
        self.relay()

    def without_faults(self) -> None:
        self._in_world(self._without_faults)

    def with_losses(self) -> None:
        self._in_world(self._with_losses)

    def elastic(self) -> None:
        """Lost hosts in a gang that continues without them."""
        self._in_world(self._elastic)

    def relay(self) -> None:
        """To several numbers of hosts, and with lost ones."""
        for count in sorted({min(count, self.hosts) for count in _RELAYED}):
            self._in_world(self._relay, World(count, self.seed, bandwidth=_SLOW_LINK))
        if self._lost and self.hosts > 16:
            self._in_world(self._relay_with_losses, World(32, self.seed, bandwidth=_SLOW_LINK))

    def _in_world(self, program: Callable[[World], None], world: World | None = None) -> None:
        world = world or World(self.hosts, self.seed)
        try:
            world.run(lambda: program(world))
            if world.loop.errors:
                raise world.loop.errors[0]
        finally:
            self.traces.append(world.network.trace)
            self.threads = max(self.threads, world.loop.most_alive)
            self.connections = max(self.connections, world.network.most_connections)

    @contextmanager
    def _phase(self, world: World, name: str) -> Iterator[None]:
        loop, network = world.loop, world.network

        def look() -> list[float]:
            frames = world.figures.frames
            messages = frames[HEAD] + world.figures.replies
            moved = network.up.carried, network.down.carried
            return [loop.now, messages, frames[PING], *moved, network.logins, time.process_time(), loop.hosts_cpu]

        loop.limit = loop.now + _PATIENCE
        before = look()
        yield
        took = [after - was for was, after in zip(before, look(), strict=True)]
        messages, pings, out, back, logins = map(int, took[1:6])
        cpu, hosts_cpu = took[6:]
        self.rows.append(Row(name, took[0], messages, pings, out, back, logins, cpu - hosts_cpu, hosts_cpu))

    # ---- without faults

    def _without_faults(self, world: World) -> None:
        for host in world.hosts.values():
            host.has_bundle = False
        with self._phase(world, "open, first time"):
            compute = world.pool(lease=LEASE).open()
        compute.close()
        with self._phase(world, "open"):
            compute = world.pool(lease=LEASE).open()
        with self._phase(world, "@, first call"):
            found = sky.function(functions.rank)() @ compute
        _check(found == list(range(self.hosts)), "every rank has one result")
        with self._phase(world, "@"):
            found = sky.function(functions.rank)() @ compute
        _check(found == list(range(self.hosts)), "every rank has one result")
        items = range(_ITEMS * self.hosts)
        with self._phase(world, f"map, {len(items):,} items"):
            found = compute.map(sky.function(functions.square), items)
        _check(found == [item * item for item in items], "every item has its result")
        _check(set(functions.RUNS.values()) == {1}, "every item is computed once")
        with self._phase(world, "idle for 20 s"):
            _sleep(world, 20)
        with self._phase(world, "close"):
            compute.close()
        _check_end(world)

    # ---- with lost hosts

    def _losses(self, world: World, share: float, within: float, names: Sequence[str]) -> set[str]:
        """Loses some hosts at random moments from now on. Returns their names."""
        chance = world.loop.random
        count = max(1, int(self._lost * share)) if self._lost else 0
        chosen = chance.sample([name for name in names if name not in world.lost], count)
        for name in chosen:
            how = chance.choice(_LOSSES)
            world.loop.after(chance.uniform(0, within), lambda name=name, how=how: world.lose(name, how, _AWAY))
        return set(chosen)

    def _with_losses(self, world: World) -> None:
        with self._phase(world, f"open, {self._lost / self.hosts:.0%} lost"):
            compute = self._open_what_answers(world)
        names = [node.name for node in compute.hosts]
        with self._phase(world, "@, hosts lost"):
            self._broadcast(world, compute, names)
        with self._phase(world, "hosts return"):
            _until(world, lambda: not _missing(world, compute), "hosts that can be reached again are back")
        with self._phase(world, "map, hosts lost"):
            self._map(world, compute, names)
        with self._phase(world, "hosts return"):
            _until(world, lambda: not _missing(world, compute), "hosts that can be reached again are back")
        with self._phase(world, "map with retries, hosts lost"):
            self._map(world, compute, names, retries=_RETRIES)
        for node in compute.hosts:
            pending = node.session.connection.replies.pending
            _check(node.lost is not None or not pending, f"{node.name} owes no reply")
        compute.close()
        _check_end(world)

    def _open_what_answers(self, world: World) -> sky.Compute:
        """Opens the pool again without the hosts that were named, until it opens."""
        names = list(world.hosts)
        self._losses(world, 0.3, 1.5, names)
        while True:
            compute = world.pool(hosts=names, lease=LEASE)
            try:
                return compute.open()
            except (HostError, PoolError) as error:
                failed = {one.host for one in (error.exceptions if isinstance(error, PoolError) else [error])}
                _check(failed <= set(world.lost), f"open names lost hosts, not {sorted(failed - set(world.lost))[:3]}")
                names = [name for name in names if name not in failed]

    def _broadcast(self, world: World, compute: sky.Compute, names: Sequence[str]) -> None:
        hit = self._losses(world, 0.3, 0.4, names)
        missing = _missing(world, compute)
        try:
            found: Sequence[Any] = sky.function(functions.rank)() @ compute
        except BroadcastError as error:
            found = error.results
            _check(bool(error.exceptions), "a broadcast that failed says why")
        except HostLost as error:
            _check(error.host in missing | hit, f"a broadcast names a lost host, not {error.host}")
            return
        _check(len(found) == len(names), f"a broadcast accounts for all {len(names)} ranks, not {len(found)}")
        for rank, (name, value) in enumerate(zip(names, found, strict=True)):
            if isinstance(value, HostLost):
                _check_lost(world, value, name)
            elif not isinstance(value, CallCancelled):
                _check(value == rank, f"rank {rank} has its own result, not {value!r:.80}")

    def _map(self, world: World, compute: sky.Compute, names: Sequence[str], *, retries: int = 0) -> None:
        self._losses(world, 0.4 if not retries else 0.3, 0.8, names)
        functions.RUNS.clear()
        items = range(_ITEMS * len(names))
        function = sky.function(retries=retries)(functions.square)
        found = compute.map(function, items, errors="return")
        _check(len(found) == len(items), "a map has a result for each item")
        for item, value in zip(items, found, strict=True):
            if isinstance(value, HostLost):
                _check(not retries, f"item {item} is computed by another host: {value}")
                _check_lost(world, value, value.host)
            else:
                _check(value == item * item, f"item {item} has its own result, not {value!r:.80}")
        if not retries:
            twice = [item for item, count in functions.RUNS.items() if count > 1]
            _check(not twice, f"nothing is computed twice without retries: {twice[:3]}")

    # ---- spare ranks

    def _elastic(self, world: World) -> None:
        least = max(1, self.hosts - 2 * self._lost)
        names = list(world.hosts)
        with world.pool(lease=LEASE, plugins=[Elastically(least, self.hosts)]) as compute:
            hit = self._losses(world, 1.0, 0.4, names[1:])  # without the head an elastic gang begins again
            with self._phase(world, "@ elastic, hosts lost"):
                found = sky.function(functions.rank)() @ compute
        _check(len(found) >= least, f"at least {least} ranks have results, not {len(found)}")
        _check(not [rank for rank, count in Counter(found).items() if count > 1], "no rank has two results")
        expected = {rank for rank, name in enumerate(names) if name not in hit}
        _check(expected <= set(found) or len(found) < self.hosts, "ranks of other hosts have results")
        _check_end(world)

    # ---- relay

    def _relay(self, world: World) -> None:
        content = bytes(self._content)
        name = name_of(content)
        with world.pool(lease=LEASE) as compute:
            with self._phase(world, f"relay to {counted(len(world.hosts), 'host')}"):
                errors = compute.relay.send({name: content}, compute.hosts)
        _check(not errors, f"a relay without faults has no errors: {list(errors.values())[:1]}")
        _check(all(name in host.blobs for host in world.hosts.values()), "every host has what was relayed")
        sent = self.rows[-1].bytes_out
        _check(sent < 1.2 * len(content), f"content leaves this machine once, not {sent / len(content):.2f} times")

    def _relay_with_losses(self, world: World) -> None:
        """Hosts are lost in the middle of a relay: the others get all, and the lost ones are named."""
        content = bytes(self._content)
        name = name_of(content)
        with world.pool(lease=LEASE) as compute:
            chance = world.loop.random
            for lost in chance.sample(list(world.hosts), 3):
                how = chance.choice(("killed", "off"))
                world.loop.after(chance.uniform(0.5, 8), lambda lost=lost, how=how: world.lose(lost, how))
            with self._phase(world, "relay to 32 hosts, 3 lost"):
                errors = compute.relay.send({name: content}, compute.hosts)
        failed = {node.name for node in errors}
        _check(
            failed <= set(world.lost), f"a relay fails for lost hosts only, not {sorted(failed - set(world.lost))[:3]}"
        )
        lacking = {one for one, host in world.hosts.items() if name not in host.blobs}
        _check(lacking <= failed, f"hosts that lack what was relayed are named: {sorted(lacking - failed)[:3]}")


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


def _check_lost(world: World, error: HostLost, name: str | None) -> None:
    """A lost host is named, and is one that did more than pause for a moment."""
    _check(error.host == name, f"an error names its host: {name}, not {error.host}")
    how = world.lost.get(str(name))
    _check(how is not None, f"{name} was never lost: {error}")
    _check(how != "silent", f"{name} was silent for less than its lease, and lost nothing: {error}")


def _missing(world: World, compute: sky.Compute) -> set[str]:
    """The hosts that the pool has lost and that could be back."""
    return {node.name for node in compute.hosts if node.lost is not None and world.lost.get(node.name) != "off"}


def _sleep(world: World, seconds: float) -> None:
    world.loop.wait(world.loop.now + seconds)


def _until(world: World, done: Callable[[], bool], what: str) -> None:
    end = world.loop.now + 4 * LEASE
    while not done():
        _check(world.loop.now < end, what)
        _sleep(world, 0.5)


def _check_end(world: World) -> None:
    """A closed pool leaves nothing behind."""
    _sleep(world, 2 * LEASE)
    _check(len(world.loop.alive) == 1, f"threads are left\n{world.loop.stacks()}")
    _check(not world.network.connections, f"{len(world.network.connections)} connections are left")
    _check(not world.figures.agents, f"{world.figures.agents} agents are left")
