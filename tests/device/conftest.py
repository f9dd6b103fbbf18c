"""Remote devices on lab hosts that have this interpreter's torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import skyfab as sky
from skyfab.lab import Lab

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def remote_pool(lent_lab: Lab) -> Iterator[sky.Compute]:
    """Two hosts over SSH, open for the whole module."""
    inventory = sky.Inventory.of(lent_lab.inventory)
    with sky.Compute(list(inventory.hosts.values())[:2], ui="none") as compute:
        for host in compute.hosts:
            compute.device("cpu", on=host.name)
        yield compute


@pytest.fixture
def device(remote_pool: sky.Compute) -> torch.device:
    """The CPU of the first host."""
    return remote_pool.device("cpu")


@pytest.fixture
def other(remote_pool: sky.Compute) -> torch.device:
    """The CPU of the second host."""
    return remote_pool.device("cpu", on=remote_pool.hosts[1].name)


@pytest.fixture
def same_numbers() -> bool:
    """Whether the device has the random numbers of this machine's CPU."""
    return True


@pytest.fixture
def syncs(device: torch.device) -> Iterator[Callable[[], int]]:
    """How often the program has waited for a value of the device so far."""
    with sky.device.profile() as found:
        yield lambda: found.waits


class Failing:
    """``with failing:`` nothing is sent meanwhile, and the first instruction of the block fails on the host."""

    def __init__(self, device: Any) -> None:
        from skyfab.device import tensors

        self._stream = tensors.streams[device.index]
        self._table = torch.zeros(3, device=device)
        self._index = torch.tensor([9]).to(device)

    def __enter__(self) -> torch.Tensor:
        """Returns the result of the instruction."""
        sky.synchronize()
        self._stream._lock.acquire()
        return self._table[self._index]

    def __exit__(self, *_: object) -> None:
        self._stream._lock.release()


@pytest.fixture
def failing(device: torch.device) -> Failing:
    return Failing(device)


@pytest.fixture
def failing_on() -> Callable[[torch.device], Failing]:
    return Failing


@pytest.fixture
def line() -> Callable[[], int]:
    """``line()``: the number of the caller's line."""
    return lambda: sys._getframe(1).f_lineno
