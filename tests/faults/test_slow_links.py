"""Slow links: a megabit a second, full of a large argument and of output. What is small and urgent still comes through.

Seconds, not minutes: the bounds are wide, since the machine may have other things to do.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import errands
import pytest
from stage import remains
from stage.remote import linger
from stage.spot import Spot, until

import skyfab as sky
from skyfab.lab import Lab
from skyfab.ui.events import Event, HostState, Output

pytestmark = pytest.mark.lab

SOON = 10.0
"""Seconds that a few bytes may take. What is before them in line would take minutes."""


@sky.function
def hello(name: str) -> str:
    print(f"hello {name}")
    return name


@sky.function
def stay(path: str) -> None:
    linger(path)


@sky.function
def never_stop(path: str) -> None:
    from pathlib import Path

    Path(path).touch()
    while True:
        print("chatter " * 20)


@pytest.fixture
def pool(lab: Lab, open_pool: Callable[..., sky.Compute], spot: Spot) -> Iterator[sky.Compute]:
    """One host behind a slow link, with four slots that have all been used."""
    pool = open_pool("openssh", count=1, lease=60, host={"slots": 4})
    futures = [hello(str(n)) > pool for n in range(40)]
    assert [future.result(170) for future in futures] == [str(n) for n in range(40)]
    lab["node1"].slow(1)
    # TCP still sends as on the fast link, loses most of it, and may stand still for seconds until it has adapted.
    assert errands.digest(random.Random(0).randbytes(256 << 10)) >> pool
    yield pool
    lab["node1"].slow(None)  # so that it closes in good time


@pytest.fixture
def happened(pool: sky.Compute) -> list[Event]:
    found: list[Event] = []
    pool.events.subscribe(found.append)
    return found


def timed(work: Callable[[], object]) -> float:
    before = time.monotonic()
    work()
    return time.monotonic() - before


@pytest.fixture
def is_prompt(
    pool: sky.Compute, spot: Spot, runs_on: Callable[[str, int], bool], happened: list[Event]
) -> Callable[[str], None]:
    """Checks how long a small call with its line takes now, and a cancel."""

    def check(name: str) -> None:
        answered = timed(lambda: hello(name) >> pool)
        lines = [event.text for event in happened if isinstance(event, Output)]
        assert lines.count(f"hello {name}") == 1, "its line is there when it returns"
        future = pool.submit(stay(spot / name))
        ((machine, pid),) = spot.read(name).items()
        assert future.cancel()
        cancelled = timed(lambda: until(lambda: not runs_on(machine, int(pid)), "the end of its process", 100))
        print(f"{name}: answered after {answered:.2f} s, cancelled after {cancelled:.2f} s")
        assert answered < SOON
        assert cancelled < SOON

    return check


def is_never_doubted(happened: list[Event]) -> None:
    states = [event for event in happened if isinstance(event, HostState)]
    assert not states, "a slow host is not a silent one"


@pytest.mark.slow
def test_a_small_call_and_a_cancel_pass_an_upload_and_a_chatty_rank(
    pool: sky.Compute, spot: Spot, happened: list[Event], is_prompt: Callable[[str], None]
) -> None:
    before = errands.sent(pool)
    upload = errands.digest(random.Random(1).randbytes(32 << 20)) > pool
    chatter = never_stop(spot / "chatting") > pool
    spot.wait("chatting")
    until(lambda: errands.sent(pool) - before > 256 * 1024, "the upload has begun", 60)
    until(lambda: any(isinstance(event, Output) for event in happened), "some chatter has come", 60)
    for name in ("first", "second"):
        is_prompt(name)
        time.sleep(1)
    assert not upload.done()
    assert not chatter.done()
    is_never_doubted(happened)
    for future in (upload, chatter):
        future.cancel()
    is_prompt("third")


def test_a_small_call_and_a_cancel_pass_a_download(
    pool: sky.Compute, spot: Spot, happened: list[Event], is_prompt: Callable[[str], None]
) -> None:
    download = errands.make(1, 32 << 20) > pool
    before = pool.hosts[0].session.moved[1]
    until(lambda: pool.hosts[0].session.moved[1] - before > 256 * 1024, "the download has begun", 60)
    is_prompt("first")
    assert not download.done()
    is_never_doubted(happened)
    download.cancel()
    is_prompt("second")


@pytest.mark.slow
def test_a_pool_closes_in_good_time_while_everything_is_under_way(
    lab: Lab, pool: sky.Compute, spot: Spot, happened: list[Event]
) -> None:
    """On the host too: nothing of what was under way is waited for."""
    upload = errands.digest(random.Random(1).randbytes(32 << 20)) > pool
    chatter = never_stop(spot / "chatting") > pool
    spot.wait("chatting")
    until(lambda: any(isinstance(event, Output) for event in happened), "some chatter has come", 60)
    assert timed(pool.close) < 20
    for future in (upload, chatter):
        with pytest.raises(sky.SkyfabError):
            future.result(10)
    left = remains.after([lab["node1"]], seconds=30)
    assert not left, f"left behind: {sorted(left)}"
