"""Distributed training with real torch and gloo: the process group is there, and gradients are those of one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import skyfab as sky
from skyfab.lab import Lab

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.lab]


@pytest.fixture(scope="module")
def lab(lent_lab: Lab) -> Lab:
    """Hosts need torch, at once."""
    return lent_lab


Hosts = Callable[..., list[sky.Host]]


def gradients(share: bool) -> Any:
    """The gradients of a small network on 24 fixed rows: all of them, or this rank's part in DDP."""
    import torch

    import skyfab as sky

    torch.manual_seed(0)
    net: Any = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).double()
    x, y = torch.randn(24, 8).double(), torch.randint(0, 3, (24,))
    if share:
        x, y = sky.shard(x, y, drop_last=True)
        net = torch.nn.parallel.DistributedDataParallel(net)
    torch.nn.functional.cross_entropy(net(x), y).backward()
    return [weights.grad.clone() for weights in net.parameters()]


def group() -> tuple[int, int, str, int]:

    import torch.distributed as dist

    if not dist.is_initialized():
        return -1, -1, "", os.getpid()
    return dist.get_rank(), dist.get_world_size(), dist.get_backend(), os.getpid()


@pytest.fixture(scope="module")
def pool(lab: Lab, hosts_of: Hosts) -> Iterator[sky.Compute]:
    """Two hosts with a rank each."""
    with sky.Compute(hosts_of("openssh", 2), plugins=[sky.plugins.torch()], ui="none") as compute:
        yield compute


@pytest.mark.parametrize(
    ("hosts", "ranks"),
    [(2, 1), pytest.param(2, 2, marks=pytest.mark.soak)],
)
@pytest.mark.slow
def test_the_gradients_are_those_of_one_process(lab: Lab, hosts_of: Hosts, hosts: int, ranks: int) -> None:
    """In a process group that is made once, and kept for later calls; a solo call has none."""
    alone, world = gradients(False), hosts * ranks
    with sky.Compute(hosts_of("openssh", hosts), ranks=ranks, plugins=[sky.plugins.torch()], ui="none") as pool:
        for found in sky.function(gradients)(True) @ pool:
            for ours, theirs in zip(alone, found, strict=True):
                assert torch.allclose(ours, theirs, atol=1e-6, rtol=0)
        first, second = (sky.function(group)() @ pool for _ in range(2))
        assert [(rank, size, kind) for rank, size, kind, _ in first] == [(r, world, "gloo") for r in range(world)]
        assert first == second
        assert (sky.function(group)() >> pool)[:3] == (-1, -1, "")


@pytest.mark.soak
def test_two_jobs_at_once_on_the_same_hosts(lab: Lab, hosts_of: Hosts) -> None:
    def total(value: float) -> float:
        import torch
        import torch.distributed as dist

        found = torch.tensor([value])
        dist.all_reduce(found)
        return found.item()

    options: dict[str, Any] = {"plugins": [sky.plugins.torch()], "ui": "none"}
    with sky.Compute(hosts_of("openssh", 2), **options) as one, sky.Compute(hosts_of("openssh", 2), **options) as two:
        futures = [pool.submit(sky.function(total)(value), on="all") for pool, value in ((one, 1.0), (two, 10.0))]
        assert [future.result() for future in futures] == [[2.0, 2.0], [20.0, 20.0]]


@pytest.mark.slow
def test_a_rank_that_fails_while_the_others_wait_in_a_collective(pool: sky.Compute) -> None:
    def uneven() -> None:
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 1:
            raise ValueError("lost its way")
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))

    with pytest.raises(sky.BroadcastError) as raised:
        sky.function(uneven)() @ pool
    assert isinstance(raised.value.exceptions[0], ValueError)
    assert [found[:3] for found in sky.function(group)() @ pool] == [(0, 2, "gloo"), (1, 2, "gloo")]


@pytest.mark.slow
def test_a_rank_that_sleeps_for_ever_in_a_collective_is_stopped_by_its_timeout(pool: sky.Compute) -> None:
    def apart() -> None:
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 0:
            time.sleep(600)
        dist.all_reduce(torch.ones(1))

    sky.function(group)() @ pool
    with pytest.raises(sky.BroadcastError) as raised:
        sky.function(timeout=1.0)(apart)() @ pool
    assert any(isinstance(error, sky.CallTimeout) for error in raised.value.exceptions)
    assert len(sky.function(group)() @ pool) == 2
