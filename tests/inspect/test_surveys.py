"""A survey of real hosts, and pools of those that meet a condition."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stage.gpus import BROKEN, gpu, plant
from stage.labs import start

import skyfab as sky
from skyfab._util import schema
from skyfab.host.ask.survey import survey
from skyfab.inspect.survey import LIMITS, Survey
from skyfab.lab import Lab


def skyfab(*words: str, cwd: Path | None = None) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-m", "skyfab", *words], capture_output=True, text=True, cwd=cwd)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def gpu_lab() -> Iterator[Lab]:
    """A free GPU, one that is used, one whose driver is broken, and a host without any."""
    with start(4) as lab:
        plant(lab, "node1", gpu())
        plant(lab, "node2", gpu(used=70000, use=99), "echo 'GPU-0, 1, 69000'")
        plant(lab, "node3", BROKEN)
        yield lab


def test_this_machine() -> None:
    found = schema.parse(Survey, survey(str(Path.home() / ".cache" / "skyfab")), LIMITS)
    assert found.cpus >= 1 and found.python.startswith("3.") and found.os
    assert found.memory and found.memory_free and found.disk and found.disk_free
    assert not found.gpus or found.gpu_tool


@pytest.mark.lab
def test_what_hosts_say_about_their_gpus(gpu_lab: Lab) -> None:
    code, out, err = skyfab("hosts", f"--inventory={gpu_lab.inventory}", "--json")
    assert code == 0, err
    free, used, broken, bare = (one["survey"] for one in json.loads(out))
    assert [gpu["name"] for gpu in free["gpus"]] == ["NVIDIA H100"]
    assert [process["user"] for process in used["gpus"][0]["processes"]] == ["root"]
    assert broken["gpu_error"].startswith("nvidia-smi: NVIDIA-SMI has failed") and broken["gpus"] == []
    assert (bare["gpu_tool"], bare["gpus"]) == (None, [])
    code, out, err = skyfab("hosts", f"--inventory={gpu_lab.inventory}")
    rows = out.splitlines()[1:]
    assert "1 H100, 86 GB free, idle" in rows[0]
    assert "1 H100 at 99 %, 12 GB free, root" in rows[1]
    assert rows[2].rstrip().endswith("ready, but nvidia-smi: NVIDIA-SMI has failed because the driver is not running")


@pytest.mark.lab
def test_a_pool_has_the_hosts_that_meet_its_condition(gpu_lab: Lab) -> None:
    lines: list[str] = []
    pool = sky.Compute(inventory=gpu_lab.inventory, where="gpu.memory >= 40GB and not busy", ui="none")
    pool.events.subscribe(lambda event: lines.append(str(event)))
    with pool:
        assert [host.name for host in pool.hosts] == ["node1"]
        info = sky.function(sky.instance_info)() >> pool
        assert info.total_nodes == 1
    assert any("node2, node3, node4: excluded by 'gpu.memory" in line for line in lines)
    with sky.Compute(inventory=gpu_lab.inventory, where="not gpus", nodes=1, ui="none") as pool:
        assert [host.name for host in pool.hosts] == ["node3"]
