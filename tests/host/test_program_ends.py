"""The ends of programs and of connections, as agents on real hosts see them."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from stage.spot import until

import skyfab as sky
from skyfab.lab import Lab, LabHost

pytestmark = pytest.mark.lab

PROGRAM = """
import os, pickle, sys, time
import skyfab as sky

host = pickle.load(sys.stdin.buffer)
with sky.Compute([host], lease=60, ui="none") as compute:
    print(sky.function(os.getpid)() >> compute, compute.hosts[0].agent.pid, flush=True)
    def work():
        while True:
            time.sleep(0.001 if prints else 1)
            prints and print("a line", flush=True)
    prints = sys.argv[1] == "prints"
    future = sky.function(work)() > compute
    time.sleep(600)
"""


class Program:
    """A program with a pool of one host, where a call runs. Its lease is a minute."""

    def __init__(self, folder: Path, host: sky.Host, lab_host: LabHost | None, ranks: str) -> None:
        self._host = lab_host
        self.place = Path(host.cache) if lab_host is None else lab_host.path(host.cache)
        env = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(Path(sky.__file__).parents[1])}
        command = [sys.executable, "-c", PROGRAM, ranks]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(pickle.dumps(host))
        self.process.stdin.close()
        with self.process.stdout as said:
            self.rank, self.agent = map(int, said.readline().split())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def ssh(self) -> int:
        (child,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(child)

    def is_running(self, pid: int) -> bool:
        """Whether its host has a process of that number."""
        if self._host is not None:
            return any(process.pid == pid for process in self._host.processes())
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    def verdict(self) -> str:
        """What the agent makes of it."""
        (log,) = self.place.glob("logs/*/agent.log")
        found = until(lambda: [line for line in log.read_text().splitlines() if "to reconnect" in line])
        return found[-1]

    def clean(self) -> None:
        self.kill()
        if self.is_running(self.agent):
            if self._host is None:
                os.kill(self.agent, signal.SIGTERM)
            else:
                self._host.run(["kill", str(self.agent)])
            until(lambda: not self.is_running(self.agent), "the end of the agent")
        shutil.rmtree(self.place)


@pytest.fixture
def start(
    namespaces: Lab, hosts_of: Callable[..., list[sky.Host]], tmp_path: Path, home: Path
) -> Iterator[Callable[[str], Program]]:
    """``start("openssh")``: a program whose host is reached so. It has a cache of its own."""
    with ExitStack() as stack:

        def one(transport: str, ranks: str = "are silent") -> Program:
            place = f"{home}/{tmp_path.name}" if transport == "local" else f"/var/tmp/{tmp_path.name}"
            changes: dict[str, Any] = {"cache": f"{place}-{transport}"}
            (host,) = hosts_of(transport, 1, **changes)
            program = Program(tmp_path, host, None if transport == "local" else namespaces.hosts[0], ranks)
            stack.callback(program.clean)
            return program

        yield one


@pytest.mark.parametrize(
    ("transport", "victim", "ranks", "verdict"),
    [
        ("openssh", "program", "prints", "the program has ended: its client has 10 s"),
        ("openssh", "ssh", "are silent", "the connection has ended: its client has 60 s"),
        ("local", "program", "are silent", "the program has ended: its client has 10 s"),
    ],
)
def test_an_agent_knows_a_program_that_was_killed_from_a_connection_that_broke(
    start: Callable[..., Program], transport: str, victim: str, ranks: str, verdict: str
) -> None:
    program = start(transport, ranks)
    if victim == "ssh":
        os.kill(program.process.pid, signal.SIGSTOP)  # else it may be back before the agent has looked
    os.kill(program.ssh() if victim == "ssh" else program.process.pid, signal.SIGKILL)
    assert program.verdict().startswith(verdict)
    assert program.is_running(program.rank), "it is waited for"


@pytest.mark.slow
def test_a_killed_program_frees_its_hosts_in_ten_seconds_whatever_its_lease(start: Callable[[str], Program]) -> None:
    programs = [start("openssh"), start("local")]
    for program in programs:
        program.kill()
    for program in programs:
        until(lambda program=program: not program.is_running(program.rank), "the end of the rank", timeout=170)
        until(lambda program=program: not program.is_running(program.agent), "the end of the agent", timeout=10)
        assert not list(program.place.glob("run/*/*"))
