"""Benchmark: time to reconnect after a connection is lost while a call runs."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import skyfab as sky
from benchmarks.arena import Arena
from benchmarks.remote import doze, nothing
from benchmarks.result import Bar, Result, Skip
from benchmarks.sample import Sample, alternate
from skyfab.lab import LabHost
from skyfab.lab.network import INTERFACE, ip
from skyfab.session.timing import HEARTBEAT

_BAR: Final = Bar(1.0, on="value")
_PATIENCE: Final = 60.0


class Reconnect:
    name = "reconnect"
    about = "from the return of a link that lost every packet for seconds, or the end of an ssh, to the next answer"

    def run(self, arena: Arena) -> Iterator[Result]:
        machine, scale = arena.first_machine, arena.scale
        if machine.wires is None:
            raise Skip("only the cables of namespace hosts can be pulled")
        host = replace(arena.first, slots=2)  # one for the running call, one for the call that is timed
        with arena.pool(host, lease=_PATIENCE) as compute, Cable.of(machine) as cable:
            for away in scale.away:
                taken = Sample(tuple(_cut(compute, cable, away, seed) for seed in range(scale.cuts)))
                yield Result(
                    row=self.name, what=f"silent for {away:g} s: after its end", unit="s", ours=taken, bar=_BAR
                )
            with arena.ssh(host, "true") as argv:
                ours, baseline = alternate(scale.cuts, lambda: _broken(compute), lambda: _connected(argv))
        yield Result(
            row=self.name,
            what="ssh killed: after that",
            unit="s",
            ours=ours,
            baseline=baseline,
            against="ssh true",
            bar=_BAR,
        )


@dataclass(frozen=True, slots=True)
class Cable:
    """The virtual network cable to a host. It can drop all packets without either end noticing."""

    host: LabHost

    @classmethod
    @contextmanager
    def of(cls, host: LabHost) -> Iterator[Cable]:
        """Sets permanent ARP entries at both ends, as behind a router; else they would send ARP requests first."""
        cable = cls(host)
        cable._know("permanent")
        try:
            yield cable
        finally:
            cable.restore()
            cable._know("stale")

    def silence(self) -> None:
        ip(f"link set {self._name} nomaster")

    def restore(self) -> None:
        ip(f"link set {self._name} master {self.host.network.bridge}")

    @property
    def _name(self) -> str:
        return self.host.network.cable(self.host.number)

    def _know(self, state: str) -> None:
        host, wires = self.host, self.host.network
        ip(f"neigh replace {host.address} lladdr {wires.hardware(host.number)} dev {wires.bridge} nud {state}")
        gateway = f"neigh replace {wires.address(1)} lladdr {wires.hardware(0)} dev {INTERFACE} nud {state}"
        host.run(["ip", *gateway.split()])


def _cut(compute: sky.Compute, cable: Cable, away: float, seed: int) -> float:
    """Seconds from the link's return to the reply of a call that was made during the outage."""
    running = _begin(compute, away + 1)
    time.sleep(random.Random(seed).uniform(0, HEARTBEAT))  # at a different moment between two heartbeats each time
    with ThreadPoolExecutor(1) as caller:
        cable.silence()
        try:
            time.sleep(away / 2)
            waiting = caller.submit(lambda: nothing() >> compute)
            time.sleep(away / 2)
            assert not waiting.done(), "the cut lets packets through"
        finally:
            cable.restore()
        returned = time.perf_counter()
        waiting.result(_PATIENCE)
        taken = time.perf_counter() - returned
    running.result(_PATIENCE)  # it was not lost
    return taken


def _broken(compute: sky.Compute) -> float:
    """Seconds from killing the ssh process of the session to the reply of a call that is made then."""
    running = _begin(compute, 1)
    os.kill(_ssh(), signal.SIGKILL)
    ended = time.perf_counter()
    nothing() >> compute
    taken = time.perf_counter() - ended
    running.result(_PATIENCE)
    return taken


def _connected(argv: list[str]) -> float:
    """Seconds for a connection by plain ssh, after surplus ssh processes of the pool have exited."""
    _ssh()
    started = time.perf_counter()
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    taken = time.perf_counter() - started
    assert done.returncode == 0, done.stderr
    return taken


def _begin(compute: sky.Compute, seconds: float) -> Future[Any]:
    """Starts a call that runs for so many seconds; returns when it is running."""
    running: Future[Any] = doze(seconds) > compute
    nothing() >> compute
    return running


def _ssh() -> int:
    """The pid of the session's ssh process: the only one, once surplus connection attempts have been terminated."""
    deadline = time.monotonic() + _PATIENCE
    while len(found := [pid for pid in _children() if _name_of(pid) == "ssh"]) != 1:
        assert time.monotonic() < deadline, f"{len(found)} programs named ssh"
        time.sleep(0.01)
    return found[0]


def _children() -> list[int]:
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in _read(task / "children").split()]


def _name_of(pid: int) -> str:
    return _read(Path(f"/proc/{pid}/comm")).strip()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has just exited
        return ""
