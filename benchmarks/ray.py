"""Benchmark: Ray ready on four hosts, from opening the pool on, against ``ray start`` by hand over ssh."""

from __future__ import annotations

import shlex
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import skyfab as sky
from benchmarks.arena import Arena
from benchmarks.result import Bar, Result, Skip
from benchmarks.sample import alternate
from skyfab.inventory.host import Host

_CPUS: Final = 1
_MEMORY: Final = 100 * 1024 * 1024
_TOKEN: Final = "0" * 64


class Ray:
    name = "ray"
    about = "Ray on all hosts, until every node has joined, against ray start by hand over ssh"

    def run(self, arena: Arena) -> Iterator[Result]:
        if find_spec("ray") is None:
            raise Skip("ray is not installed")
        if arena.lab.kind != "namespace":
            raise Skip("hosts on loopback are one machine, which can have one Ray")
        cluster = Cluster(arena, arena.hosts[: arena.scale.nodes])
        ours, by_hand = alternate(arena.scale.starts, cluster.ours, cluster.by_hand)
        yield Result(
            row=self.name,
            what=f"ready on {len(cluster.hosts)} hosts",
            unit="s",
            ours=ours,
            baseline=by_hand,
            against="ray start by ssh",
            bar=Bar(1.2),
        )


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts, and the two ways to start Ray on them. Neither time includes its end."""

    arena: Arena
    hosts: Sequence[Host]

    def ours(self) -> float:
        started = time.perf_counter()
        with self.arena.pool(*self.hosts, plugins=[sky.plugins.ray()]) as compute:
            with compute.ray(num_cpus=_CPUS, object_store_memory=_MEMORY):
                return time.perf_counter() - started

    def by_hand(self) -> float:
        """The head first, then all others together."""
        head = self.hosts[0]
        with socket.create_server(("", 0)) as probe:
            address = f"{head.address}:{probe.getsockname()[1]}"
        started = time.perf_counter()
        try:
            self._each([head], f"start --head --port={address.rpartition(':')[2]} --disable-usage-stats", start=True)
            self._each(self.hosts[1:], f"start --address={address}", start=True)
            return time.perf_counter() - started
        finally:
            self._each(self.hosts, "stop --force")

    def _each(self, hosts: Sequence[Host], command: str, *, start: bool = False) -> None:
        """Runs a command of Ray's on hosts, each by its own ssh. Raises CalledProcessError if it fails."""
        with ExitStack() as stack:
            running = []
            for host in hosts:
                options = ["env", "RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN={_TOKEN}", host.python]
                words = [*options, "-m", "ray.scripts.scripts", *shlex.split(command)]
                if start:
                    words += [f"--node-ip-address={host.address}", f"--num-cpus={_CPUS}"]
                    words += [f"--object-store-memory={_MEMORY}"]
                argv = stack.enter_context(self.arena.ssh(host, f"{shlex.join(words)} >/dev/null 2>&1 </dev/null"))
                running.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL))
            for process in running:
                if process.wait():
                    raise subprocess.CalledProcessError(process.returncode, process.args)
