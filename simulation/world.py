"""A world of simulated hosts, and what stands in it for the clock, threads, SSH and random numbers of skyfab."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import skyfab as sky
from simulation import functions
from simulation.host import Figures, SimulatedHost, SimulatedTransport
from simulation.network import Network, Os, Select
from simulation.threads import Loop, Threading, Time
from skyfab.pool import chain, compute, file_worker, host_choice, nodes, rendezvous
from skyfab.pool.node import Node
from skyfab.pool.task import Task
from skyfab.session import bootstrap, reader, shell, timing
from skyfab.session.connection import Connection
from skyfab.session.session import Session
from skyfab.ssh import logins

GIGABIT: Final = 125_000_000.0
"""Bytes a second."""
_IN_SETS: Final = (Connection, Node, Session, Task)
"""Classes whose objects are in sets: their order there must not depend on addresses in memory."""


class World:
    """Hosts that differ in their links and speed as the seed says, and a client that reaches them."""

    def __init__(self, hosts: int, seed: int, *, bandwidth: float = GIGABIT, switching: float = 0.005) -> None:
        """`bandwidth` is that of each host's link, and of this machine's."""
        self.seed = seed
        self.loop = Loop(seed, switching=switching)
        self.network = Network(self.loop, bandwidth)
        self.figures = Figures(Counter())
        listed = [sky.Host(name=f"node{number}", address=_address(number), slots=1) for number in range(1, hosts + 1)]
        self.inventory = sky.Inventory(hosts={host.name: host for host in listed})
        self.hosts = {host.name: SimulatedHost(self.network, host, self.figures, bandwidth) for host in listed}
        self._pools: list[sky.Compute] = []
        self.lost: dict[str, str] = {}
        """How each host was lost, by name."""

    def run(self, program: Callable[[], Any]) -> Any:
        """Runs a program in this world. Raises what it raises, and Stuck."""
        functions.BLOBS.clear()
        functions.PORTS.clear()
        functions.RUNS.clear()
        try:
            with self._installed():
                return self.loop.run(program)
        finally:
            for pool in self._pools:  # after a failure: its hosts and threads are gone
                pool._open = False  # noqa: SLF001
                pool._sync.close()  # noqa: SLF001

    def pool(self, **options: Any) -> sky.Compute:
        """A pool of all hosts, which have an interpreter. It is not open yet."""
        options = {"image": sky.Image(python="/usr/bin/python3"), "ui": "none", **options}
        self._pools.append(sky.Compute(inventory=self.inventory, **options))
        return self._pools[-1]

    def lose(self, name: str, how: Any, seconds: float = 8.0) -> None:
        self.lost[name] = how
        self.hosts[name].lose(how, seconds)

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        """What stands for the machine's own, while the world runs."""
        loop, chance = self.loop, random.Random(self.seed)
        words, clock, select = _Words(chance), Time(loop), Select(self.network)
        own: list[tuple[Any, str, Any]] = []
        for name, module in list(sys.modules.items()):
            if name.startswith("skyfab."):
                for attribute, real, ours in (("threading", threading, Threading(loop)), ("time", time, clock)):
                    if getattr(module, attribute, None) is real:
                        own.append((module, attribute, ours))
        own += [
            (compute, "Timing", functools.partial(timing.Timing, clock=loop.clock)),
            (reader, "_Selector", select.epoll),
            (reader, "os", Os(self.network)),
            (shell, "select", select),
            (nodes, "make_room", lambda hosts: None),
            (file_worker, "_workers", itertools.count(1)),
            (chain, "new_certificate", lambda: ("certificate", "key")),
            *((module, "secrets", words) for module in (nodes, rendezvous)),
            *((module, "random", chance) for module in (timing, logins)),
            *((module, "transport_for", self._transport) for module in (host_choice, nodes)),
        ]
        own += [(kind, "__hash__", _serial(loop)) for kind in _IN_SETS]
        with _replaced(own), _replaced([(bootstrap, "LOGINS", logins.Logins(most=256))]):
            yield

    def _transport(self, host: sky.Host, inventory: sky.Inventory) -> SimulatedTransport:
        return SimulatedTransport(self.hosts[host.name])


class _Words:
    """Stands for the module `secrets`."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def token_hex(self, size: int) -> str:
        return self._chance.randbytes(size).hex()


def _address(number: int) -> str:
    return f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"


def _serial(loop: Loop) -> Callable[[Any], int]:
    def number(self: Any) -> int:
        found = vars(self).get("_serial")
        if found is None:
            found = vars(self)["_serial"] = loop.serial()
        return int(found)

    return number


@contextlib.contextmanager
def _replaced(own: list[tuple[Any, str, Any]]) -> Iterator[None]:
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in own]
    try:
        for owner, name, value in own:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
