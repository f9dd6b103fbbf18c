"""Cuts: the network goes and comes back at random moments, and nothing is lost, and nothing happens twice."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable

import errands
import pytest
from cable import Cable, restore, silence
from errands import ERRANDS
from stage.spot import Spot, until
from stage.threads import begin

import skyfab as sky
from skyfab.lab import Lab
from skyfab.ui.events import Event, HostState

pytestmark = pytest.mark.lab

"""Seconds. The first is over before anybody notices. After the second the old connection sleeps on: what is lost is
sent again after 0.2, 0.6, 1.4, 3 and 6 s, so that a new connection comes first."""


def states(pool: sky.Compute) -> list[str]:
    """The states that hosts go through from now on."""
    found: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, HostState):
            found.append(event.state)

    pool.events.subscribe(note)
    return found


def connections(pool: sky.Compute) -> int:
    """How many have brought a hello, over all hosts."""
    return sum(node.session.connection.replies.hellos for node in pool.hosts)


def is_whole(pool: sky.Compute) -> None:
    """Every host is still a part of the pool, and works."""
    assert [node.lost for node in pool.hosts] == [None] * len(pool.hosts)
    assert errands.digest(b"") @ pool == [hashlib.sha256(b"").hexdigest()] * pool.world_size


@pytest.mark.usefixtures("hurry")
@pytest.mark.slow
def test_short_cuts(lab: Lab, open_pool: Callable[..., sky.Compute], spot: Spot) -> None:
    """The first is over before anybody notices. After the second the old connection sleeps on: what is lost is sent
    again after 0.2, 0.6, 1.4, 3 and 6 s, so that a new connection comes first."""
    everything(lab, open_pool, spot, "fabric", 3, [0.3, 4.2, 1.0])


@pytest.mark.usefixtures("hurry")
@pytest.mark.slow
def test_a_cut_of_seconds_while_everything_is_under_way(
    lab: Lab, open_pool: Callable[..., sky.Compute], spot: Spot
) -> None:
    everything(lab, open_pool, spot, "openssh", 11, [1.0, 7.0])


def everything(
    lab: Lab,
    open_pool: Callable[..., sky.Compute],
    spot: Spot,
    transport: str,
    seed: int,
    lengths: list[float],
) -> None:
    pool = open_pool(transport, count=2, lease=90, heartbeat_timeout=90, host={"slots": 4})
    errands.digest(b"") @ pool
    seen = states(pool)
    for host in lab.hosts:
        host.slow(200)
    with Cable(lab, seed, lengths, hosts=lab.hosts[:2]) as cable:
        working = [begin(lambda errand=errand: errand(pool, spot, cable.over)) for errand in ERRANDS]  # type: ignore[misc]
        for work in working:
            work.result(sum(lengths) * 2 + len(lengths) * 10 + errands.PATIENCE)
    is_whole(pool)
    assert "reconnecting" in seen
    assert "lost" not in seen
    if max(lengths) > 10:  # after a shorter one the old connection may be the first to answer
        assert connections(pool) > len(pool.hosts), "no connection was replaced: this test shows nothing"


@pytest.mark.usefixtures("hurry")
@pytest.mark.slow
def test_an_upload_goes_on_where_it_stopped(lab: Lab, open_pool: Callable[..., sky.Compute]) -> None:
    """What had arrived is not sent again, however often it is interrupted."""
    interrupted_upload(lab, open_pool("openssh", lease=90), megabytes=48, cut=4.2, mbit=200)


def interrupted_upload(lab: Lab, pool: sky.Compute, *, megabytes: int, cut: float, mbit: float) -> None:
    errands.digest(b"") >> pool
    chance = random.Random(7)
    content = b"".join(chance.randbytes(1 << 20) for _ in range(megabytes))
    before = errands.sent(pool)
    lab.hosts[0].slow(mbit)
    future = pool.submit(errands.digest(content))
    for part in (0.3, 0.7):
        until(lambda part=part: errands.sent(pool) - before > part * len(content), f"{part} of it is sent", 60)
        silence(lab.hosts)
        time.sleep(cut)
        restore(lab.hosts)
    assert future.result(errands.PATIENCE) == hashlib.sha256(content).hexdigest()
    assert len(content) <= errands.sent(pool) - before < 1.3 * len(content)
    assert connections(pool) > 1, "no connection was replaced: this test shows nothing"


@pytest.mark.usefixtures("hurry")
@pytest.mark.slow
def test_calls_made_while_the_network_is_away_run_when_it_is_back(
    lab: Lab, open_pool: Callable[..., sky.Compute], spot: Spot
) -> None:
    pool = open_pool("openssh", count=2, lease=60)
    errands.digest(b"") @ pool
    silence(lab.hosts)
    futures = [errands.note(spot / "calls", str(n)) > pool for n in range(50)]
    waiting = begin(lambda: errands.note(spot / "calls", "50") >> pool)
    gang = pool.submit(errands.note_rank(spot / "gang", "0"), on="all")
    time.sleep(1.5)
    assert not any(future.done() for future in (*futures, waiting, gang))
    restore(lab.hosts)
    assert [future.result(170) for future in (*futures, waiting)] == [str(n) for n in range(51)]
    assert gang.result(170) == [(0, "0"), (1, "0")]
    ran = sorted(int(line) for text in spot.notes("calls").values() for line in text.splitlines())
    assert ran == list(range(51))


@pytest.mark.usefixtures("hurry")
@pytest.mark.slow
def test_closing_while_the_network_is_away_does_not_wait_for_it(
    lab: Lab, open_pool: Callable[..., sky.Compute], spot: Spot
) -> None:
    pool = open_pool("openssh", count=2, lease=3)
    errands.digest(b"") @ pool
    future = pool.submit(errands.count_aloud(spot / "never"), on="node1")
    silence(lab.hosts)
    time.sleep(1)
    before = time.monotonic()
    pool.close()
    assert time.monotonic() - before < 60
    with pytest.raises(sky.SkyfabError):
        future.result(10)


# ---- at length


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_long_cuts(lab: Lab, open_pool: Callable[..., sky.Compute], spot: Spot, seed: int) -> None:
    """With the patience that users have."""
    lengths = [1.0] * 4 + [20.0] * 2
    random.Random(seed).shuffle(lengths)
    everything(lab, open_pool, spot, ("openssh", "fabric")[seed % 2], seed, lengths)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_gibibyte_goes_on_where_it_stopped(lab: Lab, open_pool: Callable[..., sky.Compute]) -> None:
    interrupted_upload(lab, open_pool("fabric", lease=90), megabytes=1024, cut=20, mbit=1000)
