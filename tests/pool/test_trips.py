"""Through how many modules of skyfab a warm call and a line of output pass on this machine: docs/how_it_works.md."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

import skyfab as sky

MOST = {"`>>`": 18, "`@`": 22, "a line of output": 12}
"""Modules whose functions run, on all threads. More of them are more to read for who follows a call."""
PAGE = Path(__file__).parents[2] / "docs" / "how_it_works.md"


class Trip:
    """Notes the modules of skyfab that run code, from when it is told to until it has enough."""

    def __init__(self) -> None:
        self._seen: set[str] | None = None

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        seen, name = self._seen, frame.f_globals.get("__name__", "")
        if seen is not None and event == "call" and name.startswith("skyfab"):
            seen.add(name.removeprefix("skyfab."))

    def of(self, action: Callable[[], object]) -> set[str]:
        self._seen = found = set()
        try:
            action()
        finally:
            self._seen = None
        return found


@pytest.fixture
def trip() -> Iterator[Trip]:
    """Threads that begin from now on are watched, and this one."""
    made = Trip()
    threading.setprofile(made.profile)
    sys.setprofile(made.profile)
    yield made
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]


@sky.function
def double(number: int) -> int:
    return 2 * number


@sky.function
def talk(lines: int) -> None:
    for _ in range(lines):
        time.sleep(0.25)
        print("a line", flush=True)


def check(name: str, found: set[str]) -> None:
    """They are no more than the page says, and that is no more than is allowed."""
    row = re.search(rf"^\| {re.escape(name)} \| ([0-9]+) \|", PAGE.read_text(), re.MULTILINE)
    assert row is not None
    assert len(found) <= int(row[1]) <= MOST[name], f"{len(found)}: {', '.join(sorted(found))}"


def test_a_warm_call_passes_few_modules(trip: Trip, open_pool: Callable[..., sky.Compute]) -> None:
    """The fewest of several calls: one that comes together with a heartbeat passes more."""
    pool = open_pool("openssh", ui="plain")
    check("`>>`", min((trip.of(lambda: double(2) >> pool) for _ in range(40)), key=len))
    check("`@`", min((trip.of(lambda: double(2) @ pool) for _ in range(40)), key=len))


def test_a_line_of_a_rank_passes_few_modules(
    trip: Trip, open_pool: Callable[..., sky.Compute], capsys: pytest.CaptureFixture[str]
) -> None:
    pool = open_pool("openssh", ui="plain")
    talk(1) @ pool
    future = pool.submit(talk(6), on="all")
    found = []
    while not future.done():
        capsys.readouterr()
        trip_of_line = trip.of(lambda: time.sleep(0.25))
        if "[0] a line" in capsys.readouterr().out:
            found.append(trip_of_line)
    check("a line of output", min(found, key=len))
