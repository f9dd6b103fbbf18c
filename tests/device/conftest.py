"""Remote devices on lab hosts that have this interpreter's torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import skyfab as sky
from skyfab.lab import Lab

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def remote_pool(lent_lab: Lab) -> Iterator[sky.Compute]:
    """Two hosts over SSH, open for the whole module."""
    inventory = sky.Inventory.load(lent_lab.inventory)
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
def syncs(device: torch.device) -> Callable[[], int]:
    """How often the program has waited for a value of the device so far."""
    from skyfab.device import tensors

    return lambda: tensors.streams[device.index].syncs
