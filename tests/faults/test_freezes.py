"""Freezes: a process that stands still (SIGSTOP) holds up nobody for longer than it may, and going on loses nothing."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import errands
import pytest
from stage import remains
from stage.remote import linger
from stage.spot import Spot, until
from stage.threads import begin

import skyfab as sky
from skyfab.lab import Lab, LabHost
from skyfab.lab.process import LabProcess
from skyfab.ui.events import Event, HostState

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("hurry")]


@sky.function
def stay(path: str) -> None:
    linger(path)


@sky.function
def stay_if_first(path: str) -> int:
    """The first rank stays; the others have done what they should."""
    rank = sky.instance_info().rank
    if rank == 0:
        linger(path)
    return rank


@pytest.fixture
def freeze() -> Iterator[Callable[[LabProcess], Callable[[], None]]]:
    """Stops a process of a host; what it returns lets it go on. After the test all do."""
    with ExitStack() as stack:

        def stop(process: LabProcess) -> Callable[[], None]:
            def go_on() -> None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.outside, signal.SIGCONT)

            stack.callback(go_on)
            os.kill(process.outside, signal.SIGSTOP)
            return go_on

        yield stop


def numbered(host: LabHost, pid: int) -> LabProcess:
    (found,) = [process for process in host.processes() if process.pid == pid]
    return found


def agent(pool: sky.Compute, host: LabHost) -> LabProcess:
    (node,) = [node for node in pool.hosts if node.name == host.name]
    return numbered(host, node.agent.pid)


def zygote(pool: sky.Compute, host: LabHost) -> LabProcess:
    parent = agent(pool, host).pid
    (found,) = [process for process in host.processes() if process.ppid == parent]
    return found


def link(host: LabHost) -> LabProcess:
    """The process that sshd started for the pool."""
    every = {process.pid: process for process in host.processes()}
    (found,) = [
        process
        for process in every.values()
        if process.cmdline[-1] == "start" and process.ppid > 1 and "sshd" in every[process.ppid].cmdline[0]
    ]
    return found


def is_cleaned_up(lab: Lab, victim: LabProcess, seconds: float) -> None:
    """Waits for the end of an agent, of its other processes and of its run folder."""
    session = victim.cmdline[-2]

    def remains_of_it() -> list[str]:
        return [trace for trace in remains.on(lab["node1"]) if session in trace]

    until(lambda: not remains_of_it(), "the end of the agent and of its folder", seconds)


Freeze = Callable[[LabProcess], Callable[[], None]]
Open = Callable[..., sky.Compute]


# ---- the agent


@pytest.mark.slow
def test_a_pool_opens_again_although_an_agent_of_its_last_opening_is_still_there(
    lab: Lab, open_pool: Open, spot: Spot, freeze: Freeze
) -> None:
    """As on a host that is so busy that the agent has not ended yet: the new opening has an agent of its own."""
    pool = open_pool("openssh", lease=6)
    assert errands.note(spot / "calls", "before") >> pool
    before = agent(pool, lab["node1"])
    go_on = freeze(before)
    pool.close()
    pool.open()
    assert errands.note(spot / "calls", "after") >> pool == "after"
    assert pool.hosts[0].agent.pid != before.pid
    go_on()
    until(lambda: gone(lab, before), "the end of the old agent")
    assert errands.note(spot / "calls", "later") >> pool == "later"


@pytest.mark.slow
def test_an_agent_that_freezes_while_another_host_answers_is_a_host_lost(
    lab: Lab, open_pool: Open, spot: Spot, freeze: Freeze
) -> None:
    pool = open_pool("openssh", count=2, lease=12, heartbeat_timeout=6)
    future = pool.submit(stay(spot / "pid"), on="node1")
    spot.wait("pid")
    victim = agent(pool, lab["node1"])
    go_on = freeze(victim)
    before = time.monotonic()
    with pytest.raises(sky.HostLost) as caught:
        future.result(170)
    assert caught.value.host == "node1"
    assert 1 < time.monotonic() - before < 60
    assert [errands.note(spot / "calls", str(n)) >> pool for n in range(5)] == list("01234")
    assert set(spot.notes("calls")) == {"node2"}
    go_on()
    is_cleaned_up(lab, victim, 12 + 20)
    before = time.monotonic()
    pool.close()
    assert time.monotonic() - before < 60


@pytest.mark.slow
def test_an_agent_that_freezes_for_a_while_loses_nothing(lab: Lab, open_pool: Open, spot: Spot, freeze: Freeze) -> None:
    """For longer than it takes to be doubted, and less than it takes to be lost."""
    pool = open_pool("openssh", count=2, lease=30, heartbeat_timeout=20, host={"slots": 3})
    errands.digest(b"") @ pool
    stop = threading.Event()
    working = [
        begin(lambda: errands.talking(pool, spot, stop)),
        begin(lambda: errands.small_calls(pool, spot, stop)),
        begin(lambda: errands.gang_cache(pool, spot, stop)),
    ]
    for length in (0.4, 2.5):
        time.sleep(0.3)
        go_on = freeze(agent(pool, lab["node1"]))
        time.sleep(length)
        go_on()
    time.sleep(0.5)
    stop.set()
    for work in working:
        work.result(errands.PATIENCE)
    assert [node.lost for node in pool.hosts] == [None] * 2


@pytest.mark.slow
def test_a_pool_whose_only_agent_is_frozen_closes_all_the_same(
    lab: Lab, open_pool: Open, spot: Spot, freeze: Freeze
) -> None:
    pool = open_pool("openssh", lease=3)
    future = pool.submit(stay(spot / "pid"))
    spot.wait("pid")
    go_on = freeze(agent(pool, lab["node1"]))
    before = time.monotonic()
    pool.close()
    assert time.monotonic() - before < 60
    with pytest.raises(sky.SkyfabError):
        future.result(10)
    go_on()
    left = remains.after([lab["node1"]], seconds=3 + 5)
    assert not left, f"left behind: {sorted(left)}"


def test_an_agent_that_is_frozen_for_longer_than_its_lease_is_lost_and_cleans_up_when_it_wakes(
    lab: Lab, open_pool: Open, spot: Spot, freeze: Freeze
) -> None:
    pool = open_pool("openssh", lease=2)
    future = pool.submit(stay(spot / "pid"))
    spot.wait("pid")
    victim = agent(pool, lab["node1"])
    go_on = freeze(victim)
    with pytest.raises(sky.HostLost, match="lease"):
        future.result(170)
    go_on()
    is_cleaned_up(lab, victim, 20)  # and nothing else: a new agent may be there already, since the pool is open


# ---- the link, which only waits


@pytest.mark.slow
def test_a_link_that_is_frozen_is_not_missed(lab: Lab, open_pool: Open, spot: Spot, freeze: Freeze) -> None:
    pool = open_pool("openssh", count=1, lease=30)
    assert errands.digest(b"") >> pool
    go_on = freeze(link(lab["node1"]))
    for n in range(20):
        assert errands.note(spot / "calls", str(n)) >> pool == str(n)
        time.sleep(0.1)
    before = time.monotonic()
    pool.close()
    assert time.monotonic() - before < 60
    go_on()
    left = remains.after([lab["node1"]], seconds=30)
    assert not left, f"left behind: {sorted(left)}"


# ---- a rank


def frozen_rank(lab: Lab, spot: Spot, freeze: Freeze) -> LabProcess:
    ((name, pid),) = spot.read("pid").items()
    rank = numbered(lab[name], int(pid))
    freeze(rank)
    return rank


def gone(lab: Lab, rank: LabProcess) -> bool:
    return all(process.outside != rank.outside for host in lab.hosts for process in host.processes())


def test_a_call_in_a_frozen_rank_can_be_cancelled(lab: Lab, open_pool: Open, spot: Spot, freeze: Freeze) -> None:
    pool = open_pool("openssh", lease=600)
    future = pool.submit(stay(spot / "pid"))
    rank = frozen_rank(lab, spot, freeze)
    assert future.cancel()
    until(lambda: gone(lab, rank), "the end of the frozen process", 60)
    assert errands.note(spot / "calls", "next") >> pool == "next"


@pytest.mark.slow
def test_a_gang_with_a_frozen_rank_has_a_timeout(lab: Lab, open_pool: Open, spot: Spot, freeze: Freeze) -> None:
    pool = open_pool("openssh", count=2, lease=600, timeout=12)
    future = pool.submit(stay_if_first(spot / "pid"), on="all")
    rank = frozen_rank(lab, spot, freeze)
    with pytest.raises((sky.CallTimeout, sky.BroadcastError)) as caught:
        future.result(170)
    assert "time" in str(caught.value)
    until(lambda: gone(lab, rank), "the end of the frozen process", 60)
    assert errands.note_rank(spot / "calls", "next") @ pool == [(0, "next"), (1, "next")]


def test_a_pool_with_a_frozen_rank_closes_in_good_time(lab: Lab, open_pool: Open, spot: Spot, freeze: Freeze) -> None:
    pool = open_pool("openssh", count=1, lease=600)
    future = pool.submit(stay(spot / "pid"))
    frozen_rank(lab, spot, freeze)
    before = time.monotonic()
    pool.close()
    assert time.monotonic() - before < 60
    with pytest.raises(sky.SkyfabError):
        future.result(10)
    left = remains.after([lab["node1"]], seconds=30)
    assert not left, f"left behind: {sorted(left)}"


# ---- the zygote, which starts and ends ranks


def test_calls_go_on_while_the_zygote_is_frozen_and_what_it_was_told_is_done_later(
    lab: Lab, open_pool: Open, spot: Spot, freeze: Freeze
) -> None:
    pool = open_pool("openssh", count=1, lease=600, host={"slots": 2})
    future = pool.submit(stay(spot / "pid"))
    ((_, pid),) = spot.read("pid").items()
    rank = numbered(lab["node1"], int(pid))
    assert errands.note(spot / "calls", "first") >> pool == "first"
    go_on = freeze(zygote(pool, lab["node1"]))
    assert [errands.note(spot / "calls", str(n)) >> pool for n in range(10)] == [str(n) for n in range(10)]
    future.cancel()
    time.sleep(1)
    go_on()
    until(lambda: gone(lab, rank), "the end of the call that was cancelled", 60)
    assert errands.note(spot / "calls", "last") >> pool == "last"


@pytest.mark.slow
def test_a_program_that_stands_still_doubts_nobody(open_pool: Callable[..., sky.Compute]) -> None:
    """It holds Python's lock for longer than any host may be silent: nothing is read, and nothing was asked."""
    pool = open_pool("openssh", count=2, lease=60)
    assert errands.digest(b"") @ pool
    before = [node.session.connection.replies.hellos for node in pool.hosts]
    seen: list[Event] = []
    pool.events.subscribe(seen.append)
    ctypes.PyDLL(None).sleep(3)
    time.sleep(1)
    assert [node.session.connection.replies.hellos for node in pool.hosts] == before
    assert not [event for event in seen if isinstance(event, HostState)]
    assert errands.digest(b"") @ pool
