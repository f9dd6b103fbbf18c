"""Errands: what a pool is kept busy with while something happens to it. Each checks that nothing was lost or doubled.

Each runs until an event is set; what it sees of the hosts it sees without the network.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stage.spot import Spot
from stage.threads import begin

import skyfab as sky
from skyfab.ui.events import Output

PATIENCE = 100.0
"""Seconds that whatever was under way may take to its end."""


# ---- on the hosts


def write_down(path: str, line: str) -> None:
    """Adds a line to a file, whole."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(handle, f"{line}\n".encode())
    finally:
        os.close(handle)


@sky.function
def note(path: str, line: str) -> str:
    write_down(path, line)
    return line


@sky.function
def note_rank(path: str, line: str) -> tuple[int, str]:
    rank = sky.instance_info().rank
    write_down(path, f"{line} {rank}")
    return rank, line


@sky.function
def count_aloud(stop: str) -> int:
    """Prints numbers until a file is there; returns how many."""
    number = 0
    while not Path(stop).exists():
        for _ in range(20):
            print(f"aloud {number} {'.' * (number % 90)}", flush=True)
            number += 1
        time.sleep(0.01)
    return number


@sky.function
def digest(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()


@sky.function
def make(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


# ---- here


def talking(pool: sky.Compute, spot: Spot, over: threading.Event, *, on: str = "node1") -> None:
    """A call that writes all the time: each line comes once, in order."""
    heard: list[str] = []

    def listen(event: object) -> None:
        if isinstance(event, Output) and event.text.startswith("aloud "):
            heard.append(event.text)

    unsubscribe = pool.events.subscribe(listen)
    try:
        future = pool.submit(count_aloud(spot / "enough"), on=on)
        over.wait()
        spot.leave("enough")
        count = future.result(PATIENCE)
    finally:
        unsubscribe()
    assert count > 0
    expected = [f"aloud {number} {'.' * (number % 90)}" for number in range(count)]
    assert len(heard) == count, f"{len(heard)} lines of {count}"
    assert heard == expected


def small_calls(pool: sky.Compute, spot: Spot, over: threading.Event) -> None:
    """Calls one after another, from two threads, as futures and by `map`: each runs once."""

    def run(name: str) -> list[str]:
        done = []
        while not over.is_set():
            done.append(note(spot / "calls", f"{name} {len(done)}") >> pool)
            time.sleep(0.002)
        return done

    def submit(name: str) -> list[str]:
        done: list[str] = []
        while not over.is_set():
            futures = [note(spot / "calls", f"{name} {len(done) + n}") > pool for n in range(20)]
            done += [future.result(PATIENCE) for future in futures]
        return done

    def spread(name: str) -> list[str]:
        done: list[str] = []
        path = spot / "calls"
        while not over.is_set():
            lines = [f"{name} {len(done) + n}" for n in range(50)]
            found = pool.map(note, [path] * len(lines), lines)
            assert found == lines
            done += found
        return done

    working = [begin(lambda: run("a")), begin(lambda: run("b")), begin(lambda: submit("c")), begin(lambda: spread("d"))]
    over.wait()
    sent = [line for work in working for line in work.result(PATIENCE)]
    ran = Counter(line for text in spot.notes("calls").values() for line in text.splitlines())
    assert len(sent) >= 20
    assert {line: count for line, count in ran.items() if count != 1} == {}, "ran more than once"
    assert set(ran) == set(sent)


def gang_cache(pool: sky.Compute, spot: Spot, over: threading.Event) -> None:
    """Broadcasts one after another: each runs once on each rank."""
    size = pool.world_size
    rounds = 0
    while not over.is_set():
        assert note_rank(spot / "gangs", str(rounds)) @ pool == [(rank, str(rounds)) for rank in range(size)]
        rounds += 1
    ran = Counter(line for text in spot.notes("gangs").values() for line in text.splitlines())
    assert ran == Counter(f"{number} {rank}" for number in range(rounds) for rank in range(size))


def uploads(pool: sky.Compute, spot: Spot, over: threading.Event, *, megabytes: int = 24) -> None:
    """Large arguments, which arrive as they were; what had arrived before a cut is not sent again."""
    rounds = 0
    while not over.is_set():
        content = random.Random(rounds).randbytes(megabytes << 20)
        before = sent(pool)
        assert digest(content) >> pool == hashlib.sha256(content).hexdigest()
        rounds += 1
        assert sent(pool) - before >= len(content)
    assert rounds


def downloads(pool: sky.Compute, spot: Spot, over: threading.Event, *, megabytes: int = 24) -> None:
    """Large results, which arrive as they were."""
    rounds = 0
    while not over.is_set():
        assert make(rounds, megabytes << 20) >> pool == random.Random(rounds).randbytes(megabytes << 20)
        rounds += 1
    assert rounds


def sent(pool: sky.Compute) -> int:
    """Bytes that have left for any host."""
    return sum(node.session.moved[0] for node in pool.hosts)


@sky.function
def twice(numbers: Iterator[int]) -> Iterator[tuple[int, bytes]]:
    """Reads a stream and yields one, with a large value now and then."""
    for number in numbers:
        yield number, bytes(300_000 if number % 50 == 0 else number % 7)


def streams(pool: sky.Compute, spot: Spot, over: threading.Event) -> None:
    """A stream to a host and one back: each value comes once, in order."""

    def numbers() -> Iterator[int]:
        number = 0
        while not over.is_set():
            yield number
            number += 1
            time.sleep(0.001)

    expected = 0
    for number, content in twice(numbers()) >> pool:
        assert number == expected
        assert len(content) == (300_000 if number % 50 == 0 else number % 7)
        expected += 1
    assert expected > 0


ERRANDS = (talking, small_calls, gang_cache, uploads, downloads, streams)
