"""The torch plugin at work: real torch, real gloo, two ranks on this machine."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import skyfab as sky

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def gang() -> Iterator[sky.Compute]:
    """Two ranks with a process group."""
    with sky.Compute("local", ranks=2, plugins=[sky.plugins.torch()], ui="none") as compute:
        yield compute


@sky.function
def total() -> tuple[float, str, int]:
    import torch
    import torch.distributed as dist

    mine = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(mine)
    return mine.item(), dist.get_backend(), dist.get_world_size()


@sky.function
def joined_by_hand(world: int, patience: float) -> tuple[int, int]:
    """In a process without a group: the head of a gang whose other ranks, if there should be any, never come."""
    import torch.distributed as dist

    from skyfab import context
    from skyfab.plugins.torch import Torch

    module: Any = sys.modules["skyfab.plugins.torch"]
    module.TIMEOUT = patience
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        context.hold_listener(listener.detach())
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with Torch().around_process(sky.InstanceInfo(world_size=world, head_port=port)):
        return context.take_listener(), dist.get_world_size()


@sky.function
def interfaces() -> list[str | None]:
    return [os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")]


@pytest.mark.slow
def test_a_gang_of_one_has_a_group_too(open_pool: Callable[..., sky.Compute]) -> None:
    """Its traffic takes the interface that the user has named."""
    env = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "ib0"}
    pool = open_pool(ranks=1, plugins=[sky.plugins.torch(backend="gloo")], env=env)
    assert total() @ pool == [(1.0, "gloo", 1)]
    assert interfaces() @ pool == [["lo", "ib0"]]


def test_the_head_listens_at_the_socket_that_it_was_given(gang: sky.Compute) -> None:
    assert joined_by_hand(1, 20.0) >> gang == (-1, 1)


def test_ranks_that_do_not_come_are_named(gang: sky.Compute) -> None:
    with pytest.raises(TimeoutError, match=r"rank 1, 2 of 3 did not connect to the rendezvous at 127\.0\.0\.1:\d+"):
        joined_by_hand(3, 0.5) >> gang
