"""Losses: a host that stays away is lost in good time and with a clear word, and nothing of the pool stays on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

import errands
import pytest
from cable import restore, silence
from stage import remains
from stage.remote import linger
from stage.spot import Spot, until

import skyfab as sky
from skyfab.lab import Lab

pytestmark = pytest.mark.lab


@sky.function
def stay(path: str) -> None:
    linger(path)


def stay_everywhere(pool: sky.Compute, spot: Spot, name: str = "pid") -> list[Future[None]]:
    futures = [pool.submit(stay(spot / name), on=node.name) for node in pool.hosts]
    spot.wait(name, count=len(futures))
    return futures


@pytest.mark.usefixtures("hurry")
@pytest.mark.slow
def test_away_for_longer_than_the_lease(lab: Lab, open_pool: Callable[..., sky.Compute], spot: Spot) -> None:
    lease = 6
    pool = open_pool("openssh", count=2, lease=lease)
    futures = stay_everywhere(pool, spot)
    cut = time.monotonic()
    silence(lab.hosts)
    for future, node in zip(futures, pool.hosts, strict=True):
        with pytest.raises(sky.HostLost, match="lease") as caught:
            future.result(170)
        assert caught.value.host == node.name
        assert caught.value.hint
    assert time.monotonic() - cut > lease - 1, "it may have come back until then"
    left = remains.after(lab.hosts, seconds=cut + lease + 20 - time.monotonic())
    assert not left, f"left behind while the cable is out: {sorted(left)}"
    restore(lab.hosts)
    lab["node1"].wait()
    lab["node2"].wait()
    with pytest.raises(sky.HostLost):
        errands.digest(b"") >> pool
    with pytest.raises(sky.SkyfabError):
        errands.digest(b"") @ pool
    pool.close()
    with pool:
        assert len(errands.digest(b"") @ pool) == 2, "opened again, it works again"


@pytest.mark.usefixtures("hurry")
@pytest.mark.slow
def test_one_of_three_is_away(lab: Lab, open_pool: Callable[..., sky.Compute], spot: Spot) -> None:
    """It is lost after `silence`, long before its lease is over."""
    pool = open_pool("openssh", count=3, host={"slots": 2}, lease=14, heartbeat_timeout=5)
    gone, *others = stay_everywhere(pool, spot)
    cut = time.monotonic()
    silence([lab["node1"]])
    while not gone.done():  # the others work as if nothing were
        for name in ("node2", "node3"):
            assert pool.submit(errands.digest(b"x"), on=name).result(170)
    with pytest.raises(sky.HostLost) as caught:
        gone.result()
    apart = time.monotonic() - cut
    assert caught.value.host == "node1"
    assert apart > 5 - 3, f"lost after {apart:.1f} s"
    assert "no heartbeat for 5 s" in str(caught.value), "and not after the whole lease"
    assert [node.lost is None for node in pool.hosts] == [False, True, True]
    assert not any(future.done() for future in others)
    assert {sky.function(lambda: sky.instance_info().hostname)() >> pool for _ in range(6)} <= {"node2", "node3"}
    with pytest.raises(sky.HostLost):
        pool.submit(errands.digest(b""), on="node1").result(170)
    with pytest.raises((sky.HostLost, sky.BroadcastError)) as group:
        errands.digest(b"") @ pool
    assert "node1" in str(group.value)
    left = remains.after([lab["node1"]], seconds=cut + 14 + 20 - time.monotonic())
    assert not left, f"left behind on the lost host: {sorted(left)}"


@pytest.mark.usefixtures("hurry")
@pytest.mark.slow
def test_the_only_host_of_a_pool_is_waited_for_until_its_lease_is_over(
    lab: Lab, open_pool: Callable[..., sky.Compute], spot: Spot
) -> None:
    """`silence` is for pools whose other hosts answer."""
    pool = open_pool("openssh", lease=60, heartbeat_timeout=1)
    assert errands.note(spot / "calls", "before") >> pool
    silence(lab.hosts)
    future = errands.note(spot / "calls", "meanwhile") > pool
    time.sleep(4)
    assert not future.done()
    restore(lab.hosts)
    assert future.result(170) == "meanwhile"
    assert spot.notes("calls")["node1"].splitlines() == ["before", "meanwhile"]


def clean(lab: Lab) -> None:
    """A host that was switched off keeps its run folder, for nobody could remove it: the next pool does, or gc."""
    from skyfab.cli.gc import gc  # hosts import this module, and have no commands

    deadline = time.monotonic() + 10
    while True:  # the pool's last attempts to come back may just have arrived
        left = remains.after([lab["node1"]], seconds=0)
        if all("/run/node1/" in name for name in left) or time.monotonic() > deadline:
            break
    assert all("/run/node1/" in name for name in left), f"left behind: {sorted(left)}"
    deadline = time.monotonic() + 20
    while left and time.monotonic() < deadline:  # the pool's last attempts to come back may just have arrived
        lab["node1"].run(["sh", "-c", "touch -d '2 days ago' /root/.cache/skyfab/run/node1/*"])
        gc.function("node1", str(lab.inventory))
        left = remains.after([lab["node1"]], seconds=0.5)
    assert not left, f"left behind after gc: {sorted(left)}"


@pytest.mark.usefixtures("hurry")
@pytest.mark.slow
def test_a_host_that_is_started_again_is_lost_at_once(
    lab: Lab, open_pool: Callable[..., sky.Compute], spot: Spot
) -> None:
    """Its processes are gone for good: nobody waits for the lease, and the others go on."""
    pool = open_pool("fabric", count=2, lease=600, heartbeat_timeout=600)
    gone, other = stay_everywhere(pool, spot)
    before = time.monotonic()
    lab["node1"].reboot()
    with pytest.raises(sky.HostLost) as caught:
        gone.result(170)
    assert caught.value.host == "node1"
    assert time.monotonic() - before < 60
    assert not other.done()
    other.cancel()
    until(lambda: other.done(), "the end of the other call")
    assert sky.function(lambda: sky.instance_info().hostname)() >> pool == "node2"
    pool.close()
    clean(lab)


@pytest.mark.usefixtures("hurry")
@pytest.mark.slow
def test_a_host_whose_power_fails_is_lost_and_the_others_go_on(
    lab: Lab, open_pool: Callable[..., sky.Compute], spot: Spot
) -> None:
    pool = open_pool("openssh", count=3, host={"slots": 2}, lease=600, heartbeat_timeout=6)
    gone, *others = stay_everywhere(pool, spot)
    lab["node1"].kill()
    try:
        with pytest.raises(sky.HostLost) as caught:
            gone.result(170)
        assert caught.value.host == "node1"
        assert [errands.digest(b"") >> pool for _ in range(4)]
        assert not any(future.done() for future in others)
        before = time.monotonic()
        pool.close()
        assert time.monotonic() - before < 60
    finally:
        lab["node1"].reboot()
    clean(lab)
