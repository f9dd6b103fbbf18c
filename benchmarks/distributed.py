"""Benchmark: DDP on two hosts: time to the first step, latency of a broadcast to running ranks, and time per step."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import skyfab as sky
from benchmarks import launcher, training
from benchmarks.arena import Arena
from benchmarks.pipe import Pipe
from benchmarks.remote import nothing
from benchmarks.result import Bar, Result, Skip
from benchmarks.sample import Sample, alternate
from skyfab.inventory.host import Host
from skyfab.lab.network import INTERFACE

_ENV: Final = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""For all ranks, however started: each has one core, and torch does not warn that hosts have no names."""
_ROOT: Final = Path(__file__).resolve().parent.parent


class Distributed:
    name = "distributed"
    about = "DDP over two hosts, against the same script by plain ssh and against torchrunx"

    def run(self, arena: Arena) -> Iterator[Result]:
        if find_spec("torch") is None:
            raise Skip("torch is not installed")
        crew = Crew(arena, arena.hosts[:2])
        lacking = _why_no_torchrunx(arena)
        yield from self._living(crew)  # first: also loads into the page cache what starting needs
        yield from self._first(crew, rival=not lacking)
        if lacking:
            raise Skip(f"torchrunx: {lacking}")

    def _living(self, crew: Crew) -> Iterator[Result]:
        """Several gangs, and as many groups started by hand: no two processes are equally fast."""
        races = [crew.race() for _ in range(crew.arena.scale.crews)]
        calls, ours, by_hand = (
            Sample(tuple(seconds * 1e3 for sample in samples for seconds in sample.values))
            for samples in zip(*races, strict=True)
        )
        yield Result(row=self.name, what="no-op @, the gang is there", unit="ms", ours=calls, bar=Bar(20.0, on="value"))
        yield Result(
            row=self.name,
            what="DDP step of 1.6 M weights",
            unit="ms",
            ours=ours,
            baseline=by_hand,
            against="plain ssh",
            bar=Bar(1.02),
        )

    def _first(self, crew: Crew, *, rival: bool) -> Iterator[Result]:
        ways = [crew.first, crew.first_by_hand, *([crew.first_by_torchrunx] if rival else [])]
        ours, by_hand, *others = alternate(crew.arena.scale.starts, *ways)
        result = Result(
            row=self.name,
            what=f"first DDP step on {len(crew.hosts)} hosts",
            unit="s",
            ours=ours,
            baseline=by_hand,
            against="plain ssh",
            bar=Bar(0.5, on="difference"),
        )
        yield result
        for other in others:
            yield replace(result, baseline=other, against="torchrunx", bar=Bar(1.0))


@dataclass(frozen=True, slots=True)
class Crew:
    """Hosts with one rank each, and the ways to start the ranks. Every start makes new processes."""

    arena: Arena
    hosts: Sequence[Host]

    def pool(self) -> sky.Compute:
        return self.arena.pool(*self.hosts, plugins=[sky.plugins.torch()], env=_ENV)

    def first(self) -> float:
        with self.pool() as compute:
            return _timed(lambda: sky.function(training.first)() @ compute)

    def first_by_hand(self) -> float:
        started = time.perf_counter()
        with self._by_hand():
            return time.perf_counter() - started

    def first_by_torchrunx(self) -> float:
        """Does not include the launcher's own import of torch."""
        addresses = [str(host.address) for host in self.hosts]
        env = os.environ | {f"{launcher.ENV}{key}": value for key, value in self._env.items()}
        with self.arena.ssh_config() as config:
            argv = [sys.executable, "-m", launcher.__name__, str(config), *addresses]
            with Pipe(argv, env=env, cwd=_ROOT) as pipe:
                _await(pipe, launcher.READY)
                started = time.perf_counter()
                pipe.send(memoryview(b"\n"))
                for _ in self.hosts:
                    _await(pipe, training.DONE)
                taken = time.perf_counter() - started
                pipe.rest()  # until it has terminated its agents
                return taken

    def race(self) -> tuple[Sample, Sample, Sample]:
        """Seconds of a no-op broadcast, of a step by skyfab, and of a step by hand. Both gangs run, and alternate."""
        scale = self.arena.scale
        with self.pool() as compute, self._by_hand() as pipes:
            laps = sky.function(training.lap)

            def ours() -> float:
                return max(laps(scale.steps) @ compute)

            def by_hand() -> float:
                for pipe in pipes:
                    pipe.send(memoryview(f"{scale.steps}\n".encode()))
                return max(float(pipe.line()) for pipe in pipes)

            ours()
            by_hand()
            (calls,) = alternate(scale.calls, lambda: _timed(lambda: nothing() @ compute))
            steps, steps_by_hand = alternate(scale.laps, ours, by_hand)
            return calls, steps, steps_by_hand

    @contextmanager
    def _by_hand(self) -> Iterator[list[Pipe]]:
        """Starts a rank on each host through its own ssh, and waits until all have finished their first step."""
        place = {"MASTER_ADDR": str(self.hosts[0].address), "MASTER_PORT": str(_free_port())}
        with ExitStack() as stack:
            pipes = []
            for rank, host in enumerate(self.hosts):
                env = self._env | place | {"WORLD_SIZE": str(len(self.hosts)), "RANK": str(rank), "LOCAL_RANK": "0"}
                words = ["exec", "env", *(f"{key}={value}" for key, value in env.items())]
                command = shlex.join([*words, host.python, "-c", Path(training.__file__).read_text()])
                pipes.append(stack.enter_context(Pipe(stack.enter_context(self.arena.ssh(host, command)))))
            for pipe in pipes:
                _await(pipe, training.DONE)
            yield pipes

    @property
    def _env(self) -> dict[str, str]:
        """Variables that skyfab determines by itself and other launchers need to be given."""
        inside = {"GLOO_SOCKET_IFNAME": INTERFACE} if self.arena.lab.kind == "namespace" else {}
        return {**_ENV, **inside}


def _timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _await(pipe: Pipe, word: str) -> None:
    while pipe.line().decode().strip() != word:
        pass


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _why_no_torchrunx(arena: Arena) -> str:
    if find_spec("torchrunx") is None:
        return "not installed"
    if arena.lab.kind != "namespace":
        return "it takes hosts on loopback for this machine itself"
    return ""
