"""Killed clients: a program that is killed at any moment of its life leaves nothing on any host, or here."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cable import restore, silence
from stage import remains, traces
from stage.spot import Spot

import skyfab as sky
from skyfab.lab import Lab

pytestmark = pytest.mark.lab

LEASE = 2.0

LIFE = f"""
import os, sys, time
import skyfab as sky

@sky.function
def ok(x):
    print("a line", x)
    return x

@sky.function
def size(content):
    import subprocess
    subprocess.Popen(["sleep", "600"])
    return len(content)

def say(text):
    print(text, flush=True)

say("opening")
with sky.Compute("lab", lease={LEASE}, ui="none") as compute:
    say("calling")
    for n in range(30):
        assert ok(n) >> compute == n
    say("together")
    assert ok(1) @ compute == [1, 1, 1]
    say("uploading")
    content = os.urandom(24 << 20)
    assert size(content) >> compute == len(content)
    assert size(content) @ compute == [len(content)] * 3
    say("waiting")
    future = compute.submit(sky.function(lambda: time.sleep(600))(), on="node2")
    time.sleep(0.3)
    say("closing")
say("closed")
"""
"""One of everything, in about two seconds; it says what it does as it does it."""


class Client:
    """The program of a person, in a process of its own."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self._lab = lab
        self._script = folder / "client.py"
        self._script.write_text(LIFE)
        self._env = {**os.environ, "SKYFAB_INVENTORY": str(lab.inventory), "TMPDIR": str(folder)}
        self._env["PYTHONPATH"] = str(Path(sky.__file__).parents[1])

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(self._script)],
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def lifetime(self) -> float:
        """Seconds from its beginning to its natural end."""
        began = time.monotonic()
        running = self.start()
        out, err = running.communicate(timeout=170)
        assert running.returncode == 0, err
        assert out.split()[-1] == "closed"
        return time.monotonic() - began

    def kill_after(self, seconds: float) -> str:
        """Starts it and kills it; returns what it was doing."""
        running = self.start()
        try:
            running.wait(seconds)
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGKILL)
        out, err = running.communicate(timeout=170)
        assert running.returncode in (0, -signal.SIGKILL), err
        return (out.split() or ["starting"])[-1]


@pytest.fixture
def client(lab: Lab, tmp_path: Path, spot: Spot) -> Iterator[Client]:
    """Nothing of it stays on this machine: ssh, above all."""
    before = traces.here(lab.folder)  # the lab itself
    yield Client(lab, tmp_path)
    left = traces.left([lambda: traces.here(lab.folder)], before)
    assert not left, f"left behind on this machine: {sorted(left)}"


def kill_at_random_moments(lab: Lab, client: Client, seed: int, times: int) -> None:
    """Some of them find nothing of skyfab on the hosts, and are killed while they bring it."""
    chance = random.Random(seed)
    lifetime = client.lifetime()
    found = []
    for number in range(times):
        fresh = number % 3 == 2
        if fresh:
            for host in lab.hosts:
                for cache in remains.caches(host):
                    shutil.rmtree(cache)
        # One part of its life after another, so that each has its turn, but at any moment of it.
        moment = lifetime * (number + chance.random()) / times
        found.append(client.kill_after(moment))
        print(f"killed after {moment:.2f} s of {lifetime:.2f}, {found[-1]}{', hosts without a cache' * fresh}")
        left = remains.after(lab.hosts, seconds=LEASE + 5)
        assert not left, f"left behind {LEASE + 5} s after a kill while {found[-1]}: {sorted(left)}"
    assert len(set(found)) > 1, f"always killed at the same place: {found}"


@pytest.mark.slow
def test_a_client_that_is_killed_at_any_moment_leaves_nothing(lab: Lab, client: Client) -> None:
    kill_at_random_moments(lab, client, seed=5, times=5)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [31])
def test_a_client_that_is_killed_while_the_network_is_away_leaves_nothing(lab: Lab, client: Client, seed: int) -> None:
    """Nobody tells the hosts: they find out by themselves."""
    client.lifetime()
    running = client.start()
    assert running.stdout is not None
    while running.stdout.readline().strip() != "waiting":
        pass
    silence(lab.hosts)
    running.send_signal(signal.SIGKILL)
    running.communicate(timeout=170)
    left = remains.after(lab.hosts, seconds=LEASE + 5)
    restore(lab.hosts)
    assert not left, f"left behind: {sorted(left)}"
