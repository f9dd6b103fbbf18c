"""Full disks: a host without room says so. What needs none goes on; with room again, everything does."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import errands
import pytest
from cable import restore, silence
from model import is_all_but_noted
from stage.spot import Spot
from stage.threads import begin

import skyfab as sky
from skyfab.lab import Lab, LabHost
from skyfab.ui.events import Output

pytestmark = pytest.mark.lab

MB = 1 << 20
PLACE = "/small"
SIZE = 20
"""Megabytes: enough for skyfab, the tests' own modules and a few logs."""


@sky.function
def speak(lines: int, width: int = 1000) -> int:
    for number in range(lines):
        print(f"spoken {number} {'.' * width}")
    return lines


@sky.function
def keep_speaking(stop: str, width: int = 1000) -> int:
    from pathlib import Path

    number = 0
    while not Path(stop).exists():
        print(f"spoken {number} {'.' * width}", flush=True)
        number += 1
    return number


@pytest.fixture
def small(lab: Lab) -> Iterator[LabHost]:
    """node1, with a small disk for its cache."""
    host = lab["node1"]
    host.run(["mkdir", "-p", PLACE])
    host.small_disk(PLACE, SIZE)
    yield host
    host.run(["umount", PLACE])


@pytest.fixture
def pool(small: LabHost, open_pool: Callable[..., sky.Compute]) -> sky.Compute:
    pool = open_pool("openssh", count=1, ranks=2, lease=10, host={"cache": f"{PLACE}/cache", "slots": 2})
    assert errands.digest(b"") @ pool
    return pool


@pytest.fixture
def spoken(pool: sky.Compute) -> list[int]:
    """The numbers of the lines that have come."""
    found: list[int] = []

    def listen(event: object) -> None:
        if isinstance(event, Output) and event.text.startswith("spoken "):
            found.append(int(event.text.split()[1]))

    pool.events.subscribe(listen)
    return found


def fill(host: LabHost) -> None:
    host.run(["sh", "-c", f"cat /dev/zero >{PLACE}/fill"], check=False)
    assert host.run(["df", "--output=avail", PLACE]).stdout.split()[-1] == "0"


def make_room(host: LabHost) -> None:
    host.run(["rm", "-f", f"{PLACE}/fill"])


def works(pool: sky.Compute, spot: Spot) -> None:
    large = random.Random(1).randbytes(2 * MB)
    assert errands.note(spot / "calls", "one") >> pool == "one"
    assert len(errands.note_rank(spot / "calls", "all") @ pool) == 2
    assert errands.digest(large) >> pool == errands.digest.fn(large)


def test_more_output_than_the_disk_has_room_for(
    small: LabHost, pool: sky.Compute, spoken: list[int], spot: Spot
) -> None:
    """Each line comes, once and in order, though none of them can be kept."""
    lines = 2 * SIZE * 1000
    assert speak(lines) >> pool == lines
    assert spoken == list(range(lines))
    works(pool, spot)


def test_a_disk_that_is_full_once_skyfab_has_arrived(small: LabHost, hosts_of: Callable[..., list[sky.Host]]) -> None:
    """The host says so, and no file that is cut off is left: with room again, it works."""
    small.run(["sh", "-c", f"head -c {(SIZE - 1) * MB} /dev/zero >{PLACE}/fill"])
    (host,) = hosts_of("openssh", 1, cache=f"{PLACE}/cache")
    for _ in range(2):
        with pytest.raises(sky.HostUnfit, match="No space left") as full:
            sky.Compute([host], ui="none").open()
        assert full.value.hint is not None
        assert "free some space" in full.value.hint
    make_room(small)
    with sky.Compute([host], ui="none") as pool:
        assert sky.function(abs)(-3) >> pool == 3


@pytest.mark.usefixtures("hurry")
def test_more_output_than_the_disk_has_room_for_while_nobody_listens(
    lab: Lab, small: LabHost, pool: sky.Compute, spoken: list[int], spot: Spot
) -> None:
    """The process has to wait; it goes on when the network is back, and nothing is missing."""
    future = keep_speaking(spot / "enough") > pool
    while len(spoken) < 100:
        time.sleep(0.01)
    silence(lab.hosts)
    time.sleep(2.5)
    restore(lab.hosts)
    time.sleep(0.5)
    spot.leave("enough")
    count = future.result(170)
    assert spoken == list(range(count))
    works(pool, spot)


@sky.function
def count_until(stop: str) -> int:
    from pathlib import Path

    number = 0
    while not Path(stop).exists():
        print(f"line {number}", flush=True)
        number += 1
        time.sleep(0.001)
    return number


def test_a_detached_run_on_a_full_disk_says_in_its_log_what_is_missing(
    small: LabHost, hosts_of: Callable[..., list[sky.Host]], spot: Spot
) -> None:
    """How much it is, and where; what comes later, with room again, is complete."""
    (host,) = hosts_of("openssh", 1, cache=f"{PLACE}/cache")
    with sky.Compute([host], ui="none") as pool:
        run = pool.launch(count_until(spot / "enough"))
    wait_for(lambda: "line 500" in lines_of(run))
    fill(small)
    seen = wait_for_silence(run)
    make_room(small)
    wait_for(lambda: len(lines_of(run)) > len(seen) + 500)
    spot.leave("enough")
    (count,) = run.result(170)
    found = lines_of(run)
    assert is_all_but_noted(found, [f"line {number}" for number in range(count)])
    assert sum("the disk was full" in line for line in found) == 1
    assert found[-1] == f"line {count - 1}"


def test_a_run_continues_if_its_program_ends_while_the_disk_is_full(
    small: LabHost, hosts_of: Callable[..., list[sky.Host]], spot: Spot
) -> None:
    (host,) = hosts_of("openssh", 1, cache=f"{PLACE}/cache")
    with sky.Compute([host], ui="none") as pool:
        run = pool.launch(count_until(spot / "enough"))
        wait_for(lambda: "line 5" in lines_of(run))
        fill(small)
        wait_for_silence(run)
    time.sleep(2)  # the agent notes in its log that the program has ended
    assert run.status == "running"
    spot.leave("enough")
    wait_for(lambda: run.status == "failed")
    with pytest.raises(sky.BroadcastError) as raised:
        run.result(10)
    why = "its host was restarted, or its disk was full"
    assert f"rank 0 of count_until ended without a result: {why}" in str(raised.value.exceptions[0])


def lines_of(run: sky.Run) -> list[str]:
    return [text for _, stream, text in run.logs() if stream == "out"]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def wait_for_silence(run: sky.Run) -> list[str]:
    """The lines, once no more of them come."""
    seen: list[str] = []
    while (now := lines_of(run)) != seen:
        seen = now
        time.sleep(0.3)
    return seen


def test_whatever_is_asked_of_a_host_with_a_full_disk_ends(small: LabHost, pool: sky.Compute, spot: Spot) -> None:
    """With a result or with a clear error, never in silence; and with room again all of it works."""
    errands.note(spot / "calls", "before") >> pool
    fill(small)
    anew = sky.function(lambda: "anew")
    asks: dict[str, Callable[[], object]] = {
        "small call": lambda: errands.note(spot / "calls", "full") >> pool,
        "new function": lambda: anew() >> pool,
        "gang": lambda: errands.note_rank(spot / "calls", "full") @ pool,
        "gang with a large argument": lambda: errands.digest(random.Random(2).randbytes(4 * MB)) @ pool,
        "reference": lambda: errands.digest(pool.put(random.Random(3).randbytes(4 * MB))) >> pool,
        "output": lambda: speak(5000) >> pool,
        "a process that dies": lambda: sky.function(lambda: __import__("os")._exit(3))() >> pool,
        "and the one after it": lambda: errands.note(spot / "calls", "after") >> pool,
    }
    for name, ask in asks.items():
        asked = begin(ask)
        try:
            found: object = asked.result(170)
        except TimeoutError:
            pytest.fail(f"{name}: no answer in a minute")
        except sky.SkyfabError as error:
            found = error
        print(f"{name}: {found!r:.300}")
        if isinstance(found, Exception):
            assert "No space left" in str(found) or isinstance(found, sky.WorkerDied), name
    make_room(small)
    assert pool.hosts[0].lost is None
    assert anew() >> pool == "anew"
    works(pool, spot)


def test_a_run_does_not_begin_on_a_full_disk(small: LabHost, pool: sky.Compute) -> None:
    fill(small)
    with pytest.raises(sky.HostUnfit, match="No space left"):
        pool.launch(sky.function(abs)(-3))
    make_room(small)
    assert small.run(["ls", f"{PLACE}/cache/runs"]).stdout == ""
    assert pool.launch(sky.function(abs)(-3)).result() == [3, 3]
