"""Detached runs that an earlier version has written: they can be read, stopped and fetched.

stored_runs/ has the folders of two runs as skyfab 0.1 wrote them on a host. If a change makes a test here fail, runs
that users have started could no longer be read: read the old format too.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import skyfab as sky

STORED = Path(__file__).with_name("stored_runs")
NIGHT, BAD = "6a8885278bbd9132", "3f708c8325afef1a"
AGENT = """
import json, signal, sys

def stop(*ignored):
    status = json.load(open(sys.argv[1]))
    status |= {"state": "stopped", "ended": status["started"] + 60, "ranks": {"0": "stopped", "1": "stopped"}}
    json.dump(status, open(sys.argv[1], "w"))
    sys.exit()

signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
while True:
    signal.pause()
"""
"""What the agent of a run does when it is stopped: it writes how the run ended, and ends."""


@pytest.fixture
def host(tmp_path: Path) -> sky.Host:
    cache = tmp_path / "cache"
    shutil.copytree(STORED, cache / "runs")
    for path in (cache, *cache.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return sky.Host(name="node1", transport="local", cache=str(cache))


def test_runs_are_listed_with_their_states(host: sky.Host) -> None:
    found = {run.name: (run.id, run.function, run.status, run.hosts, run.world_size) for run in sky.runs([host])}
    assert found == {
        "night": (NIGHT, "train", "done", ["node1"], 2),
        "bad": (BAD, "fails", "failed", ["node1"], 1),
    }


def test_the_output_and_the_result_of_each_rank_are_read(host: sky.Host) -> None:
    run = sky.attach("night", [host])
    lines = list(run.logs())
    assert [text for rank, stream, text in lines if (rank, stream) == (1, "out")] == [
        "rank 1 of 2",
        "step 0: loss 1.00",
        "step 1: loss 0.50",
        "step 2: loss 0.33",
    ]
    assert (0, "err", "careful") in lines
    results = run.result()
    assert [one["rank"] for one in results] == [0, 1]
    assert {one["weights"] for one in results} == {b"\x00\x01" * 50}


def test_a_failure_is_raised_as_it_was(host: sky.Host) -> None:
    with pytest.raises(sky.BroadcastError) as raised:
        sky.attach("bad", [host]).result()
    (error,) = raised.value.exceptions
    assert isinstance(error, ValueError) and str(error) == "no more data"
    assert "train.py" in str(error.__cause__)


def test_a_running_one_is_stopped(host: sky.Host, tmp_path: Path) -> None:
    folder = Path(str(host.cache)) / "runs" / NIGHT
    status = json.loads((folder / "status").read_text())
    status |= {"state": "running", "ended": None, "ranks": {"0": "running", "1": "running"}}
    (folder / "status").write_text(json.dumps(status))
    command = [sys.executable, "-c", AGENT, str(folder / "status")]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None and agent.stdout.readline() == "ready\n"
        boot = Path("/proc/sys/kernel/random/boot_id")
        (folder / "agent").write_text(f"{agent.pid} {boot.read_text().strip() if boot.exists() else '?'} {tmp_path}\n")
        run = sky.attach("night", [host])
        try:
            assert run.status == "running"
            run.stop()
        finally:
            agent.kill()
    assert run.status == "stopped"
