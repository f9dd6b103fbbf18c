"""`skyfab stacks`: where ranks are, asked by another program than the one that started them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage.remote import leave, wait_for
from stage.spot import Spot, until

import skyfab as sky
from skyfab.inspect.stacks import STACKS, Frame, Stack, frames_of
from skyfab.lab import Lab
from skyfab.session.question import Reply
from skyfab.ui.events import Stalled

SAID = """
Thread 0x0000ffff (most recent call first):
  File "/x/threading.py", line 3 in wait

Current thread 0x0000aaaa (most recent call first):
  File "/x/load.py", line 12 in next
  File "/x/train.py", line 90 in train
  File "/c/bundles/b/skyfab/host/agent/worker.py", line 200 in _perform
  File "/c/bundles/b/skyfab/host/agent/worker.py", line 90 in serve
"""


def parsed(text: str = SAID) -> list[Stack]:
    """The stacks in what a host says."""
    about = {"rank": 2, "pid": 41, "pool": "9f", "text": text}
    return STACKS.parse(sky.Host(name="node1"), iter([Reply(about, b"")]))


def stacks(lab: Lab) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "SKYFAB_INVENTORY": str(lab.inventory)}
    argv = [sys.executable, "-m", "skyfab", "stacks", "--hosts=node1,node2"]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=170)


@pytest.mark.lab
def test_ranks_at_the_same_place_are_shown_together(
    namespaces: Lab, hosts_of: Callable[..., list[sky.Host]], spot: Spot
) -> None:
    here, go = spot / "here", spot / "go"

    @sky.function
    def everyone() -> int:
        rank = sky.instance_info().rank
        leave(f"{here}{rank}")
        return in_collective(rank) if rank != 2 else in_loader(rank)

    def in_collective(rank: int) -> int:
        wait_for(go)
        return rank

    def in_loader(rank: int) -> int:
        wait_for(go)
        return rank

    with sky.Compute(hosts_of("openssh", 2), ranks=2, ui="none") as pool:
        future = pool.submit(everyone(), on="all")
        for rank in range(4):
            spot.wait(f"here{rank}")

        def shown() -> subprocess.CompletedProcess[str] | None:
            """Who waits looks around now and then, and may be found doing so."""
            ran = stacks(namespaces)
            return ran if "3 ranks in wait_for at " in ran.stdout and "1 rank in wait_for at " in ran.stdout else None

        ran = until(shown, "three ranks at one place, and one at another")
        spot.leave("go")
        assert future.result() == [0, 1, 2, 3], "nobody was disturbed"
        idle = stacks(namespaces)
    assert ran.returncode == 0, ran.stderr
    assert "3 ranks in wait_for at " in ran.stdout and "node1[0], node1[1], node2[3]" in ran.stdout
    assert "1 rank in wait_for at " in ran.stdout and "in_loader at " in ran.stdout and "node2[2]" in ran.stdout
    assert "4 ranks waiting for a call: node1[0], node1[1], node2[2], node2[3]" in idle.stdout
    assert "no ranks" in stacks(namespaces).stderr


def test_the_main_thread_counts_and_our_own_frames_do_not() -> None:
    (found,) = parsed()
    assert (found.host, found.rank, found.pid, found.pool) == ("node1", 2, 41, "9f")
    assert [str(frame) for frame in found.frames] == ["next at /x/load.py:12", "train at /x/train.py:90"]


def test_files_of_a_project_are_named_without_the_folder_of_the_host() -> None:
    frames = [
        frames_of(f'Thread 0x1:\n  File "{cache}/trees/{"ab" * 32}/000/lib/load.py", line 3 in load\n', "node1")
        for cache in ("/home/ada/.cache/skyfab", "/scratch/bob")
    ]
    assert frames[0] == frames[1] == (Frame(file="lib/load.py", line=3, function="load"),)


def of_files(*files: str) -> list[str]:
    lines = [f'  File "{file}", line 3 in f' for file in files]
    return [frame.file for frame in frames_of("\n".join(["Thread 0x1:", *lines]), "node1")]


def test_a_function_that_waits_for_an_actor_is_shown() -> None:
    agent = "/c/bundles/b/skyfab/host/agent"
    waits = ("/x/threading.py", f"{agent}/exchanges.py", f"{agent}/worker.py", "/c/bundles/b/skyfab/context.py")
    calls = (f"{agent}/actors.py", f"{agent}/actors.py", "/x/train.py", "/x/main.py")
    serves = (f"{agent}/actors.py", f"{agent}/worker.py", f"{agent}/worker.py", "/x/runpy.py")
    assert of_files(*waits, *calls, *serves) == ["/x/train.py", "/x/main.py"]
    assert of_files("/c/bundles/b/skyfab/protocol/mux.py", *serves[1:]) == []


@pytest.mark.parametrize("number", ["²", "9" * 5000, "-1"])
def test_invalid_numbers_are_passed_over(number: str) -> None:
    assert frames_of(f'Thread 1:\n  File "f", line {number} in g\n', "node1") == ()


@given(st.text())
def test_whatever_a_host_says_is_read(text: str) -> None:
    parsed(text=text)


@pytest.mark.lab
def test_a_call_that_stands_still_is_looked_at_by_itself(
    namespaces: Lab, hosts_of: Callable[..., list[sky.Host]], spot: Spot
) -> None:
    """All its ranks are shown, alike ones together, once; what moves is no news, and nobody is disturbed."""
    go = spot / "go"

    @sky.function(stall=1.0)
    def everyone() -> int:
        rank = sky.instance_info().rank
        child = subprocess.Popen(["sleep", "60"])  # it gets no signal
        in_loader() if rank == 2 else in_collective()
        return rank if child.poll() is None else -1  # no assert: pytest's would need pytest there

    waiting = ["sh", "-c", f"until test -e '{go}'; do sleep 0.1; done"]

    def in_collective() -> None:
        subprocess.run(waiting)

    def in_loader() -> None:
        subprocess.run(waiting)

    found: list[Stalled] = []
    with sky.Compute(hosts_of("openssh", 2), ranks=2, ui="none") as pool:
        pool.events.subscribe(lambda event: found.append(event) if isinstance(event, Stalled) else None)
        future = pool.submit(everyone(), on="all")
        until(lambda: bool(found), "a look at the ranks")
        spot.leave("go")
        assert future.result() == [0, 1, 2, 3]
        assert "3 ranks in" in found[0].text
        assert "node2[2]" in next(part for part in found[0].text.split("ranks in") if "in_loader" in part)
        assert "everyone has made no progress for 1 s" in str(found[0])

        @sky.function(stall=0.5)
        def busy() -> int:
            end = time.monotonic() + 2
            while time.monotonic() < end:
                deeper(random.randrange(50))
            return 1

        def deeper(steps: int) -> None:
            deeper(steps - 1) if steps else time.sleep(0.01)

        assert busy() >> pool == 1
        assert not [event for event in found if "busy" in event.function]
