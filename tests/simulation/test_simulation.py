"""The simulation of many hosts: seeds replay, defects are found, and what it has found stays fixed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import skyfab as sky
from simulation.__main__ import main
from simulation.scenario import Broken, Scenario
from simulation.threads import Loop, Stuck, Threading
from simulation.world import World
from skyfab.pool import map as map_module
from skyfab.protocol.blobs import name_of

ROOT = Path(__file__).resolve().parents[2]


def test_the_same_seed_is_the_same_run_in_every_process() -> None:
    program = "import sys; from simulation.__main__ import main; sys.exit(main(['--hosts=5', '--seed=3', '--seeds=2']))"
    runs = []
    for number in (1, 2):
        env = {**os.environ, "PYTHONHASHSEED": str(number)}
        command = [sys.executable, "-c", program]
        runs.append(subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100).stdout)
    assert runs[0] == runs[1]
    first, second = runs[0].splitlines()
    assert first.startswith("seed 3: all promises kept, trace ")
    assert first.split("trace ")[1] != second.split("trace ")[1]


def test_twenty_hosts_keep_all_promises(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--hosts=20", "--seed=7"]) == 0
    shown = capsys.readouterr().out
    for row in ("open, first time", "@, first call", "map, 60 items", "map, hosts lost", "relay to 16 hosts"):
        assert row in shown
    assert "memory of this machine for each host" in shown


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_thousand_hosts_that_lose_a_tenth_keep_all_promises() -> None:
    scenario = Scenario(1000, 7)
    scenario.with_losses()
    assert scenario.threads < 1000


def test_a_defect_is_found_and_its_seed_replays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The defect: a map that loses a host returns the error of one item for the next one as well."""

    def broken(self: map_module.MapCall, task: object, first: int, count: int, future: object) -> None:
        came(self, task, first + (first == 7), count, future)  # type: ignore[arg-type]

    came = map_module.MapCall._came
    monkeypatch.setattr(map_module.MapCall, "_came", broken)
    failures = []
    for _ in range(2):
        assert main(["--hosts=5", "--seed=2", "--seeds=3"]) == 1
        failures.append(capsys.readouterr().err)
    assert failures[0] == failures[1]
    assert "replay it: ./inv sim --hosts=5 --seed=2" in failures[0]
    with pytest.raises(Broken):
        Scenario(5, 2).run()


def test_what_waits_forever_is_found() -> None:
    loop = Loop(1)
    threads = Threading(loop)

    def program() -> None:
        one, other = threads.Lock(), threads.Lock()

        def crosswise(first: object, second: object) -> None:
            with first:  # type: ignore[attr-defined]
                loop.wait(loop.now + 1)
                with second:  # type: ignore[attr-defined]
                    pass

        both = [threads.Thread(target=crosswise, args=pair) for pair in ((one, other), (other, one))]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()

    with pytest.raises(Stuck, match=r"3 threads wait at 1\.0 s"):
        loop.run(program)


# ---- what the simulation has found


def test_a_pool_that_does_not_open_gives_up_hosts_that_it_lost() -> None:
    """Else it would try to reach them forever, and start agents of a pool that is not open."""
    world = World(3, 1)

    def program() -> None:
        world.hosts["node1"].is_reachable = False
        world.loop.after(3, lambda: world.lose("node2", "killed"))
        with pytest.raises(sky.Unreachable, match="timed out"):
            world.pool().open()
        before = world.network.logins
        world.loop.wait(world.loop.now + 60)
        assert len(world.loop.alive) == 1
        assert world.network.logins == before
        assert world.figures.agents == 0

    world.run(program)


def test_opening_wakes_threads_and_sends_heartbeats_in_proportion_to_hosts() -> None:
    pings = []
    for hosts in (20, 80):
        world = World(hosts, 1)
        world.run(lambda world=world: world.pool().open().close())  # type: ignore[misc]
        pings.append(world.figures.frames[3])
    assert pings[1] < 8 * max(pings[0], 1) + 80


def test_hosts_at_the_end_of_a_long_relay_wait_for_their_sources() -> None:
    """They got nothing for seconds, since their sources had nothing yet, and left them: content left here again."""
    world = World(120, 3, bandwidth=12_500_000.0)
    content = bytes(16 << 20)
    sent: list[float] = []

    def program() -> None:
        with world.pool() as compute:
            before = world.network.up.carried
            assert not compute.relay.send({name_of(content): content}, compute.hosts)
            sent.append((world.network.up.carried - before) / len(content))

    world.run(program)
    assert all(host.blobs for host in world.hosts.values())
    assert sent[0] < 1.2
