"""Benchmark: trials of a sweep, against calls of `map` that each start the same process; and how a queue goes on."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from benchmarks.arena import Arena
from benchmarks.remote import start_process
from benchmarks.result import Bar, Result
from benchmarks.sample import Sample, alternate

_THERE = "/tmp/skyfab-bench-sweep"
_SCRIPT = f"""\
import time
with open("{_THERE}/starts", "a") as file:
    file.write(f"{{time.time()}}\\n")
"""
_HOLD = f"""\
import os, sys, time
def note(what):
    with open(f"{_THERE}/{{sys.argv[1]}}.new", "w") as file:
        file.write(str(time.time()))
    os.replace(file.name, f"{_THERE}/{{sys.argv[1]}}.{{what}}")
note("start")
while not os.path.exists(f"{_THERE}/{{sys.argv[1]}}.go"):
    time.sleep(0.005)
note("end")
"""
_HOSTS, _SLOTS = 2, 4
_PATIENCE = 60.0


class Sweep:
    name = "sweep"
    about = "trials of `skyfab sweep` that do nothing, against calls of `map` that each start the same process"

    def run(self, arena: Arena) -> Iterator[Result]:
        with _Project(arena) as project:
            count = arena.scale.in_a_row
            with arena.pool(arena.first, slots=1) as compute:

                def calls() -> float:
                    compute.map(start_process, [project.script] * count)
                    return project.interval()

                def trials() -> float:
                    project.sweep(f"n=1..{count}", "--slots=1", f"--hosts={arena.first.name}")
                    return project.interval()

                ours, called = alternate(arena.scale.sweeps, trials, calls)
            yield Result(
                row=self.name,
                what="start of a trial after another, one slot",
                unit="ms",
                ours=ours,
                baseline=called,
                against="map, a process each",
                bar=Bar(1.3),
            )
            hosts = ",".join(host.name for host in arena.hosts[:_HOSTS])
            began = time.perf_counter()
            project.sweep(f"n=1..{arena.scale.trials}", f"--slots={_SLOTS}", f"--hosts={hosts}")
            taken = time.perf_counter() - began
            what = f"{arena.scale.trials:,} trials of nothing, {_HOSTS * _SLOTS} slots"
            yield Result(row=self.name, what=what, unit="s", ours=Sample.of(taken))


class Queue:
    name = "queue"
    about = "runs that wait with `skyfab run --when-free`: from the end of one to the first line of the next"

    def run(self, arena: Arena) -> Iterator[Result]:
        with _Project(arena) as project:
            names = [f"turn{number}" for number in range(arena.scale.turns + 1)]
            waited = []
            for before, name in zip([None, *names], names, strict=False):
                project.queue(name)
                if before is not None:
                    project.wait_for("skyfab-gpus.*.ticket.*", folder="/tmp")
                    project.touch(f"{before}.go")
                    waited.append(project.moment(f"{name}.start") - project.moment(f"{before}.end"))
                project.moment(f"{name}.start")
            project.touch(f"{names[-1]}.go")
            project.moment(f"{names[-1]}.end")
        yield Result(
            row=self.name,
            what="a GPU is released, the next run starts",
            unit="s",
            ours=Sample(tuple(waited)),
            bar=Bar(1.0, on="value"),
        )


@dataclass
class _Project:
    """A folder with scripts, and one on the hosts in which they leave times."""

    arena: Arena

    def __enter__(self) -> _Project:
        self._temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self._temporary.name)
        (self.folder / "trial.py").write_text(_SCRIPT)
        (self.folder / "hold.py").write_text(_HOLD)
        inventory = self.arena.inventory
        hosts = {name: replace(host, gpus=(0,)) for name, host in inventory.hosts.items()}
        (self.folder / "inventory.toml").write_text(replace(inventory, hosts=hosts).to_toml())
        for machine in self.arena.lab.hosts:
            machine.run(["mkdir", "-p", "-m", "1777", _THERE])
        self.script = f"{_THERE}/trial.py"
        self.arena.first_machine.run(["sh", "-c", f"cat >{self.script}"], stdin=_SCRIPT)
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.arena.lab.hosts:
            machine.run(["rm", "-rf", _THERE])
        self._temporary.cleanup()

    def sweep(self, *words: str) -> None:
        self._skyfab("sweep", "trial.py", *words)

    def queue(self, name: str) -> None:
        """Starts a run that takes the one GPU of the host as soon as that is free."""
        options = ["--detach", "--when-free", "--gpus=1", f"--name={name}", f"--hosts={self.arena.first.name}"]
        self._skyfab("run", *options, "hold.py", name)

    def _skyfab(self, *words: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "skyfab", *words],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    def interval(self) -> float:
        """Milliseconds from one start to the next, since the last time; the median."""
        said = self.arena.first_machine.run(["sh", "-c", f"cat {_THERE}/starts; rm {_THERE}/starts"]).stdout
        return 1e3 * statistics.median(after - before for before, after in pairwise(map(float, said.split())))

    def touch(self, name: str) -> None:
        self.arena.first_machine.run(["touch", f"{_THERE}/{name}"])

    def moment(self, name: str) -> float:
        """When a script noted that, by the host's clock."""
        return float(self.wait_for(name))

    def wait_for(self, pattern: str, folder: str = _THERE) -> str:
        """The content of a file, once it is there."""
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            done = self.arena.first_machine.run(["sh", "-c", f"cat {folder}/{pattern}"], check=False)
            if done.returncode == 0:
                return done.stdout
            time.sleep(0.05)
        raise TimeoutError(f"{folder}/{pattern} never came")
