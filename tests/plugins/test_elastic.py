"""Elastic gangs: real torch.distributed.elastic on real hosts, whose ranks fail and which are killed and cut off."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from stage.remote import leave
from stage.spot import Spot

import skyfab as sky
from skyfab.lab import Lab

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.torch, pytest.mark.lab]


@sky.function
def stumble(times: int) -> tuple[int, int, float]:
    """Fails on rank 1 so many times; then says who is there, and that they can talk."""
    import torch
    import torch.distributed as dist

    info = sky.instance_info()
    if info.attempt < times and info.rank == 1:
        raise ValueError(f"stumbled in attempt {info.attempt}")
    found = torch.ones(1)
    dist.all_reduce(found)
    return info.attempt, info.world_size, found.item()


@sky.function
def epochs(folder: str, count: int) -> dict[str, Any]:
    """Counts epochs in a checkpoint on every host, with all ranks in step; goes on where the furthest one was."""
    import torch
    import torch.distributed as dist

    info, checkpoint = sky.instance_info(), Path(folder) / "checkpoint"
    done = torch.tensor([int(checkpoint.read_text()) if checkpoint.exists() else 0])
    dist.all_reduce(done, dist.ReduceOp.MAX)
    began = done.item()
    for epoch in range(int(began), count):
        dist.barrier()
        leave(str(checkpoint), str(epoch + 1))
        if epoch == 3:
            leave(f"{folder}/midway")
        time.sleep(0.2)
    return {"began": began, "world": info.world_size, "attempt": info.attempt, "host": info.hostname}


def test_ranks_that_fail_are_started_again() -> None:
    plugin = sky.plugins.torch(elastic=(1, 1), max_restarts=2)
    with sky.Compute("local", ranks=2, plugins=[plugin], ui="none") as pool:
        assert stumble(1) @ pool == [(1, 2, 2.0)] * 2
        assert stumble(0) @ pool == [(0, 2, 2.0)] * 2


def test_what_fails_too_often_is_raised_as_itself() -> None:
    plugin = sky.plugins.torch(elastic=(1, 1), max_restarts=1)
    with sky.Compute("local", ranks=2, plugins=[plugin], ui="none") as pool:
        with pytest.raises(sky.BroadcastError) as raised:
            stumble(5) @ pool
        first = raised.value.exceptions[0]
        assert isinstance(first, ValueError)
        assert str(first) == "stumbled in attempt 1"
        assert "in stumble" in str(first.__cause__)
        assert stumble(0) @ pool == [(0, 2, 2.0)] * 2


@pytest.mark.parametrize(("victim", "how"), [pytest.param(2, "kill", marks=pytest.mark.soak), (0, "kill"), (1, "cut")])
def test_a_host_that_dies_is_left_out(namespaces: Lab, victim: int, how: str) -> None:
    """Training goes on from the checkpoint with those that remain, the head or not, silently gone or not."""
    with Lab.start(3, kind="namespace", python=sys.executable) as lab:
        spot = Spot(lab.hosts)
        hosts = list(sky.Inventory.load(lab.inventory).hosts.values())
        plugin = sky.plugins.torch(elastic=(2, 3), max_restarts=2)
        with sky.Compute(hosts, plugins=[plugin], ui="none") as pool:
            future = pool.submit(epochs(str(spot / ""), 8), on="all")
            spot.wait("midway", 3)
            getattr(lab[hosts[victim].name], how)()
            found = future.result(90)
        assert len(found) == 2
        assert {report["world"] for report in found} == {2}
        assert all(report["began"] >= 3 and report["attempt"] >= 1 for report in found)
        assert hosts[victim].name not in {report["host"] for report in found}
        spot.close()


@pytest.mark.parametrize("given", [{"elastic": (0, 2)}, {"elastic": (3, 2)}, {"elastic": (1, 2), "max_restarts": -1}])
def test_what_cannot_be_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(sky.UsageError, match="cannot be"):
        sky.plugins.torch(**given)
