"""Cut openings: the network goes while a pool opens. The opening goes on or says what is wrong, and leaves nothing."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cable import restore, silence
from stage import remains, remote
from stage.index import Index, isolate_uv
from stage.threads import begin

import skyfab as sky
from skyfab.lab import Lab
from skyfab.ui.events import Event, HostState

pytestmark = pytest.mark.lab

ENOUGH = 100.0
"""Seconds after which an opening has hung."""

version_of = sky.function(remote.version_of)


@pytest.fixture(autouse=True)
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uv sees nothing of this machine's settings and caches."""
    isolate_uv(tmp_path, monkeypatch)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The default index, which no host can reach: all that is installed is sent from here."""
    with Index(tmp_path / "index") as found:
        monkeypatch.setenv("PIP_INDEX_URL", found.url)
        noise = random.Random(1).randbytes(4 << 20)  # it cannot be packed smaller: that is what is under way
        found.add("shelf", "1.0", requires=["book"], files={"shelf/noise.bin": noise})
        found.add("book", "2.0")
        yield found


def forget(lab: Lab) -> None:
    """Nothing of skyfab is on any host."""
    for host in lab.hosts:
        for cache in remains.caches(host):
            shutil.rmtree(cache)


def opening(hosts: list[sky.Host], image: sky.Image | None = None) -> tuple[str, float]:
    """Opens a pool, calls, closes it; returns what came of it and how long it took. Raises what is no clear error."""
    seen: list[Event] = []
    pool = sky.Compute(hosts, image=image, lease=20, ui="none")
    pool.events.subscribe(seen.append)
    began = time.monotonic()

    def work() -> str:
        with pool:
            if image is not None:
                assert version_of("shelf") @ pool == ["1.0"] * len(hosts)
        return "opened"

    working = begin(work)
    try:
        found = working.result(ENOUGH)
    except TimeoutError:
        states = [str(event) for event in seen if isinstance(event, HostState)]
        pytest.fail(f"an opening that never ends; so far: {states}")
    except (sky.HostError, sky.PoolError) as error:
        found = str(error)
    assert found == "opened" or any(host.name in found for host in hosts), f"which host? {found}"
    return found, time.monotonic() - began


def cut_at(lab: Lab, moment: float, seconds: float, work: Callable[[], tuple[str, float]]) -> tuple[str, float]:
    """Pulls the cable that long after the beginning of the work."""

    def pull() -> None:
        time.sleep(moment)
        silence(lab.hosts)
        time.sleep(seconds)
        restore(lab.hosts)

    pulling = begin(pull)
    try:
        return work()
    finally:
        pulling.result(seconds + moment + 60)


def cut_at_random_moments(
    lab: Lab, hosts: list[sky.Host], image: sky.Image | None, *, seed: int, cuts: list[float]
) -> None:
    chance = random.Random(seed)
    forget(lab)
    found, usual = opening(hosts, image)
    assert found == "opened"
    results = []
    for number, seconds in enumerate(cuts):
        forget(lab)
        moment = usual * (number + chance.random()) / len(cuts)
        results.append(cut_at(lab, moment, seconds, lambda: opening(hosts, image))[0])
        print(f"cut for {seconds} s after {moment:.2f} s of {usual:.2f}: {results[-1]}")
        left = remains.after(lab.hosts, seconds=20 + 5 + seconds)
        assert not left, f"left behind: {sorted(left)}"
    assert "opened" in results, f"no opening survives a second without network: {results}"
    assert opening(hosts, image)[0] == "opened"


@pytest.mark.parametrize(("transport", "seed"), [("openssh", 41), pytest.param("fabric", 42, marks=pytest.mark.soak)])
@pytest.mark.slow
def test_a_cut_while_skyfab_itself_is_brought(
    lab: Lab, hosts_of: Callable[..., list[sky.Host]], transport: str, seed: int
) -> None:
    cut_at_random_moments(lab, hosts_of(transport, 2), None, seed=seed, cuts=[1.0] * 2)


@pytest.mark.parametrize(("transport", "seed"), [pytest.param("openssh", 43, marks=pytest.mark.soak), ("fabric", 44)])
@pytest.mark.slow
def test_a_cut_while_packages_are_installed(
    lab: Lab, hosts_of: Callable[..., list[sky.Host]], index: Index, transport: str, seed: int
) -> None:
    hosts = hosts_of(transport, 2)
    cut_at_random_moments(lab, hosts, sky.Image(pip=["shelf"]), seed=seed, cuts=[1.0] * 2)


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_host_that_is_gone_for_good_while_it_is_prepared_is_given_up(
    lab: Lab, hosts_of: Callable[..., list[sky.Host]], index: Index
) -> None:
    """In less than two minutes: nobody waits for a machine without power for ever."""
    forget(lab)
    pool = sky.Compute(hosts_of("openssh", 2), image=sky.Image(pip=["shelf"]), lease=20, ui="none")
    reached = threading.Event()

    def listen(event: Event) -> None:
        if isinstance(event, HostState) and event.host == "node1" and event.detail == "installing":
            reached.set()

    pool.events.subscribe(listen)
    working = begin(pool.open)
    try:
        assert reached.wait(60)
        silence([lab["node1"]])
        with pytest.raises(sky.HostError) as caught:
            working.result(120)
        assert caught.value.host == "node1"
    finally:
        restore([lab["node1"]])
        pool.close()
        if working.exception(60) is None:
            pool.close()
    # There is no lease yet: its shell ends when word of the end gets through, which is tried ever more rarely.
    left = remains.after(lab.hosts, seconds=90)
    assert not left, f"left behind: {sorted(left)}"
