"""Endurance: after thousands of calls both sides are as large as they were after hundreds."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from stage.spot import until

import skyfab as sky
from skyfab.lab import Lab
from skyfab.ui.events import Output

pytestmark = pytest.mark.lab

MB = 1 << 20
ROOM = 8 * MB
"""What a side may grow by: allocators keep some. It is four of the large arguments, of which there are dozens."""


@sky.function
def echo(value: object) -> object:
    return value


@sky.function
def say(value: object) -> object:
    print("said", value)
    return value


@dataclass(frozen=True, slots=True)
class Size:
    """A process as the system sees it."""

    memory: int
    threads: int
    descriptors: int


def size(pid: int) -> Size:
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    memory = int(status["VmRSS"].split()[0]) * 1024
    return Size(memory, int(status["Threads"]), len(list(Path(f"/proc/{pid}/fd").iterdir())))


def sizes(lab: Lab) -> dict[str, Size]:
    """This program, and for each host all that runs there beside its sshd: a cancelled call costs one its process."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # what was freed and is only kept for the next time does not count
        ctypes.CDLL(None).malloc_trim(0)
    found = {"here": size(os.getpid())}
    for host in lab.hosts:
        every = [size(process.outside) for process in host.processes() if "sshd" not in process.cmdline[0]]
        found[host.name] = Size(
            sum(one.memory for one in every),
            sum(one.threads for one in every),
            sum(one.descriptors for one in every),
        )
    return found


def work(pool: sky.Compute, calls: int) -> None:
    """So many calls of every kind, some of which write, fail, are cancelled or are large."""
    done = 0
    number = 0
    ranks = pool.world_size
    while done < calls:
        number += 1
        assert echo(number) >> pool == number
        assert say(number) >> pool == number
        assert [future.result(170) for future in [echo(n) > pool for n in range(20)]] == list(range(20))
        assert pool.map(lambda n: n + 1, range(30)) == list(range(1, 31))
        assert say(number) @ pool == [number] * ranks
        assert pool.submit(echo(number), on="node2").result(170) == number
        assert (echo(1) & echo(2)) >> pool == (1, 2)
        with pytest.raises(ZeroDivisionError):
            sky.function(divide)(0) >> pool
        done += 57
        if number % 5 == 0:
            content = bytes([number % 256]) * (2 * MB)
            assert echo(content) >> pool == content
            assert echo(content) @ pool == [content] * ranks
            assert pool.map(echo, [content] * 2) == [content] * 2
            (echo(number) > pool).cancel()


def divide(n: int) -> float:
    return 1 / n


@pytest.mark.slow
def test_a_thousand_calls_leave_both_sides_as_they_were(lab: Lab, hosts_of: Callable[..., list[sky.Host]]) -> None:
    """In a program of its own: how large this one is depends on the tests before."""
    program = "import pickle, sys, test_endurance; test_endurance.work_and_compare(*pickle.load(sys.stdin.buffer))"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps((lab.folder, hosts_of("openssh", 2, slots=2), 600, 1200)),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[:2]))},
        capture_output=True,
        timeout=800,
    )
    print(ended.stdout.decode())
    assert ended.returncode == 0, ended.stderr.decode()


def work_and_compare(folder: Path, hosts: list[sky.Host], first: int, then: int) -> None:
    with sky.Compute(hosts, ranks=2, lease=60, ui="none") as pool:
        compare(Lab.load(folder), pool, first, then)


def compare(lab: Lab, pool: sky.Compute, first: int, then: int) -> None:
    lines = [0]

    def count(event: object) -> None:
        lines[0] += isinstance(event, Output)

    pool.events.subscribe(count)
    work(pool, first)
    settle(pool)
    before = sizes(lab)
    work(pool, then)
    settle(pool)
    with contextlib.suppress(AssertionError):  # a timer may still run; what is left of it is said below
        until(lambda: is_no_larger(sizes(lab), before), timeout=10)
    after = sizes(lab)
    for name in before:
        print(f"{name}: {before[name]} → {after[name]}")
    assert lines[0] >= then // 57
    grown = {name: after[name].memory - before[name].memory for name in before}
    assert max(grown.values()) < ROOM, f"memory grew: {grown}"
    assert is_no_larger(after, before), "more threads or descriptors than before"


def is_no_larger(after: dict[str, Size], before: dict[str, Size]) -> bool:
    """Not a thread or descriptor more."""
    pairs = [(after[name], before[name]) for name in before]
    return all(a.threads <= b.threads and a.descriptors <= b.descriptors for a, b in pairs)


def settle(pool: sky.Compute) -> None:
    """Until nothing is under way any more, and every process is there."""
    sessions = [node.session for node in pool.hosts]
    until(lambda: not any(session.connection.replies.pending for session in sessions), "every call answered")
    for future in [echo(n) > pool for n in range(100)]:
        future.result(170)
    assert pool.world_size == len(echo(0) @ pool)
