"""`skyfab top` at a real terminal, with real hosts: keys, runs, hosts that are lost, and 64 of them."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from stage.gpus import gpu, plant
from stage.labs import start
from stage.spot import until
from stage.typist import Typist

from skyfab.lab import Lab

PROGRAM = [sys.executable, "-m", "skyfab"]
JOB = """
import time

def train():
    for step in range(1000):
        print("step", step, flush=True)
        time.sleep(0.1)
"""
ALTERNATE, RESTORED = "\x1b[?1049h", "\x1b[?1049l"


class Person(Typist):
    """Sits at a terminal of some size."""

    def __init__(self, words: list[str], folder: Path, columns: int = 100, lines: int = 24) -> None:
        super().__init__(words, folder, COLUMNS="", LINES="")
        self.resizes(columns, lines)
        self.before = termios.tcgetattr(self._theirs)

    def resizes(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def has_the_terminal_back(self) -> bool:
        """It is as it was, and the last screen is the one from before."""
        return termios.tcgetattr(self._theirs) == self.before and self.said.rstrip().endswith(RESTORED)

    def hears_of(self, key: bytes, pattern: str, timeout: float = 60) -> re.Match[str]:
        self.presses(key)
        return self.sees(pattern, timeout)


def skyfab(folder: Path, *words: str) -> str:
    done = subprocess.run([*PROGRAM, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture(scope="module")
def two() -> Iterator[Lab]:
    with start(2) as lab:
        yield lab


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "inventory.toml").write_text(f'[hosts.here]\ntransport = "local"\ncache = "{tmp_path}/here"\n')
    return tmp_path


# ---- this machine alone


def test_without_a_terminal_it_is_printed_once(folder: Path) -> None:
    head, here = skyfab(folder, "top").splitlines()
    assert head.split()[:3] == ["host", "address", "system"] and here.split()[0] == "here"
    found = json.loads(skyfab(folder, "top", "--json"))
    assert found["hosts"][0]["survey"]["cpus"] and found["runs"] == []


@pytest.mark.parametrize("end", [b"q", signal.SIGTERM])
def test_however_it_ends_the_terminal_is_as_it_was(folder: Path, end: bytes | int) -> None:
    with Person([*PROGRAM, "top"], folder) as person:
        person.sees("1 host: 1 ready")
        assert not person.echoes() and ALTERNATE in person.said
        if isinstance(end, bytes):
            person.presses(end)
        else:
            os.kill(person.process.pid, end)
        assert person.ends() == (0 if isinstance(end, bytes) else 143)
        assert person.has_the_terminal_back()


def test_ctrl_z_gives_the_terminal_back_and_fg_takes_it_again(folder: Path) -> None:
    """In a shell: it is the one that stops and continues programs."""
    with Person(["bash", "--norc", "-i"], folder) as person:
        person.types(shlex.join([*PROGRAM, "top"]))
        person.sees("1 host: 1 ready")
        person.hears_of(b"\x1a", re.escape(RESTORED))
        person.sees("Stopped")
        person.sees("bash-")
        person.types("fg")
        person.sees(re.escape(ALTERNATE))
        person.sees("1 host: 1 ready")
        person.hears_of(b"q", re.escape(RESTORED))
        person.sees("bash-")
        person.types("echo code $?; exit")
        person.sees("code 0")
        assert person.ends() == 0


def test_a_smaller_window_has_fewer_columns(folder: Path) -> None:
    with Person([*PROGRAM, "top"], folder, columns=160) as person:
        person.sees("host +address +system")
        person.resizes(60, 12)
        person.sees(r"host +CPUs +load")
        person.hears_of(b"?", "stop the run")
        person.hears_of(b"q", "1 host: 1 ready")
        person.presses(b"q")
        assert person.ends() == 0


# ---- hosts


@pytest.mark.lab
def test_a_run_is_followed_looked_at_and_stopped(two: Lab, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    given = f"--inventory={two.inventory}"
    run = skyfab(tmp_path, "run", given, "--hosts=all", "--ranks=1", "--detach", "job.py:train").strip()
    try:
        with Person([*PROGRAM, "top", given, "--every=1"], tmp_path) as person:
            person.sees("2 hosts: 2 ready · 1 run, 1 running")
            person.sees(rf"{run} +running.* step \d+")
            person.hears_of(b"\tl", rf"log of {run}")
            person.sees(r"node[12]\[1\] step \d+")
            person.hears_of(b"q", rf"{run} +running")
            person.hears_of(b"s", r"2 ranks in train at job.py:")
            person.hears_of(b"q", rf"{run} +running")
            person.hears_of(b"x", r"stop \w+ on 2 hosts\? y/n")
            person.hears_of(b"n", "not stopped")
            person.hears_of(b"x", r"stop \w+ on 2 hosts\? y/n")
            person.hears_of(b"y", rf"{run} is stopped")
            person.sees(rf"{run} +stopped")
            person.presses(b"q")
            assert person.ends() == 0 and person.has_the_terminal_back()
    finally:
        skyfab(tmp_path, "stop", given, run)
    until(lambda: not _busy(two), 30)


@pytest.mark.lab
def test_a_host_that_is_lost_is_shown_and_comes_back(tmp_path: Path) -> None:
    with start(2) as lab, Person([*PROGRAM, "top", f"--inventory={lab.inventory}", "--every=1"], tmp_path) as person:
        person.sees("2 hosts: 2 ready")
        lab.hosts[1].cut()
        person.sees("1 ready, 1 l")
        person.sees(r"no response for \d+ s|last heard \d+ s ago")
        lab.hosts[1].restore()
        person.sees("2 hosts: 2 ready")
        person.presses(b"q")
        assert person.ends() == 0


def _busy(lab: Lab) -> list[str]:
    return [host.name for host in lab.hosts if any("skyfab" in " ".join(one.cmdline) for one in host.processes())]


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_hosts_over_one_connection_each(tmp_path: Path) -> None:
    """All are shown by scrolling, all are looked at again, and nothing is left when it ends."""
    count = 24
    with start(count, python=sys.executable) as lab:
        with Person([*PROGRAM, "top", f"--inventory={lab.inventory}"], tmp_path, columns=80) as person:
            person.sees(f"{count} hosts: {count} ready", timeout=400)
            for selected in (*range(22, count, 21), count):  # 21 are on the screen, the selected one in the middle
                person.hears_of(b"\x1b[6~", rf"\x1b\[7mnode{selected}\b")
            for host in lab.hosts:
                assert re.search(rf"{host.name}\b.* ready", person.said), host.name
            assert _connections(person.process.pid) == count
            person.presses(b"\x1b[F")
            plant(lab, f"node{count}", gpu(used=5000, use=97))
            person.sees(r"1 H100 at 97 %, 80 GB free, in use")
            person.presses(b"q")
            assert person.ends() == 0 and person.has_the_terminal_back()
        until(lambda: not _busy(lab))


def _connections(pid: int) -> int:
    """How many ssh programs of a process run."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [child for task in tasks for child in (task / "children").read_text().split()]
    return sum(Path(f"/proc/{child}/comm").read_text().strip() == "ssh" for child in children)
