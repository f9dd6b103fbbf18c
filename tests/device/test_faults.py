"""What goes wrong on a device, its host or its link: typed errors at the right line, and nothing silently wrong."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import skyfab as sky
from skyfab.lab import Lab
from skyfab.lab.process import LabProcess

torch = pytest.importorskip("torch")
nn = torch.nn

pytestmark = pytest.mark.lab


def steps(device: Any, count: int, between: Callable[[int], None] = lambda _: None) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.linspace(-1, 1, 80).view(10, 8).to(device)
    losses = []
    for number in range(count):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss)
        between(number)
    return [loss.item() for loss in losses]


# ---- errors of operations


def test_wrong_shapes_and_dtypes_are_errors_at_once(device: Any, syncs: Callable[[], int]) -> None:
    before = syncs()
    with pytest.raises(RuntimeError, match="reduction dim"):
        torch.ones(2, 3, device=device) @ torch.ones(2, 3, device=device)
    with pytest.raises(RuntimeError, match="dtype"):
        torch.ones(2, 2, device=device) @ torch.ones(2, 2, device=device, dtype=torch.float64)
    with pytest.raises(IndexError):
        torch.ones(2, device=device)[5]
    assert syncs() == before


def test_an_error_names_operator_shapes_host_and_line(device: Any, remote_pool: sky.Compute, line: Any) -> None:
    table = torch.zeros(3, 4, device=device)
    index = torch.tensor([7]).to(device)
    found, called_at = table[index], line()
    with pytest.raises(sky.DeviceError, match="index 7 is out of bounds") as caught:
        found.cpu()
    expected = f"index.Tensor(float32[3, 4], int64[1]) at {__file__}:{called_at} failed: "
    assert str(caught.value).startswith(f"{remote_pool.hosts[0].name}: {expected}")


def test_after_an_error_tensors_are_as_if_the_program_had_stopped_there(device: Any, failing: Any) -> None:
    kept = torch.zeros(3, device=device)
    with failing as bad:
        kept.add_(1)
        made = torch.full((2,), 5.0, device=device)
    with pytest.raises(sky.DeviceError, match="out of bounds"):
        sky.synchronize()
    assert kept.tolist() == [0, 0, 0]
    with pytest.raises(sky.DeviceError, match="has no value"):
        bad.sum().item()
    with pytest.raises(sky.DeviceError, match="has no value"):
        made.tolist()
    kept.add_(2)
    assert kept.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y[0].add_(1),
        lambda y: y.copy_(torch.zeros(3)),
        lambda y: y.index_fill_(0, torch.tensor([7]).to(y.device), 0.0),  # it is the one that fails
    ],
)
def test_after_an_error_what_autograd_has_recorded_and_the_host_not_done_is_an_error(
    device: Any, failing: Any, change: Any
) -> None:
    """With gradients of the change, and without its values, `backward` would be silently wrong."""
    x = torch.ones(3, device=device, requires_grad=True)
    y, counted = x * 2, torch.zeros(3, device=device)
    with failing:
        change(y)
        counted.add_(1)  # nothing is recorded: it is as before
    with pytest.raises(sky.DeviceError, match="out of bounds"):
        torch.sky.synchronize()
    assert counted.tolist() == [0, 0, 0]
    with pytest.raises(sky.DeviceError, match="out of bounds"):
        y.tolist()

    def gradients() -> list[float]:
        y.square().sum().backward()
        return x.grad.tolist()  # type: ignore[no-any-return]

    with pytest.raises(sky.DeviceError, match="out of bounds"):
        gradients()
    x.grad = None
    (x * 3).sum().backward()
    assert x.grad.tolist() == [3, 3, 3]


def test_too_little_memory_says_how_much_there_is(device: Any) -> None:
    with pytest.raises(sky.DeviceError, match="GiB free"):
        torch.empty(1 << 50, device=device, dtype=torch.uint8).fill_(1).sum().item()
    assert torch.ones(2, device=device).sum().item() == 2


# ---- the worker, the link, the host


def worker_of(lab: Lab, host: Any) -> LabProcess:
    """The process of the only device of a pool on a host: the child of its agent's only child."""
    found = lab[host.name].processes()
    (zygote,) = [process.pid for process in found if process.ppid == host.agent.pid]
    (worker,) = [process for process in found if process.ppid == zygote]
    return worker


@pytest.fixture
def own_pool(lent_lab: Lab) -> Iterator[Callable[..., sky.Compute]]:
    inventory = sky.Inventory.of(lent_lab.inventory)
    pools = []

    def opened(count: int = 1, **options: Any) -> sky.Compute:
        pools.append(sky.Compute(list(inventory.hosts.values())[2 : 2 + count], ui="none", **options))
        pools[-1].open()
        return pools[-1]

    yield opened
    for host in lent_lab.hosts:
        host.restore()
    for pool in pools:
        pool.close()


@pytest.mark.slow
def test_a_killed_worker_is_an_error_within_two_seconds(lent_lab: Lab, own_pool: Callable[..., sky.Compute]) -> None:
    pool = own_pool(2)
    first, second = (pool.device("cpu", on=host.name) for host in pool.hosts)
    kept = torch.ones(2, device=second)
    killed: list[float] = []

    def kill(number: int) -> None:
        if number == 20:
            os.kill(worker_of(lent_lab, pool.hosts[0]).outside, signal.SIGKILL)
            killed.append(time.monotonic())

    with pytest.raises(sky.WorkerDied, match="tensors are lost") as caught:
        steps(first, 100_000, kill)
    assert time.monotonic() - killed[0] < 10, "well under two seconds on a machine that has nothing else to do"
    assert caught.value.host == pool.hosts[0].name
    assert (kept + 1).tolist() == [2, 2]
    again = pool.device("cpu", on=pool.hosts[0].name)
    assert torch.ones(3, device=again).sum().item() == 3


@pytest.mark.slow
def test_a_cut_in_the_middle_of_training_changes_nothing(lent_lab: Lab, own_pool: Callable[..., sky.Compute]) -> None:
    pool = own_pool(1, lease=60)
    device = pool.device("cpu")
    expected = steps(device, 60)
    machine = lent_lab[pool.hosts[0].name]

    def cut(number: int) -> None:
        if number == 30:
            machine.cut()
            threading.Timer(5, machine.restore).start()

    assert steps(device, 60, cut) == expected


@pytest.mark.slow
def test_a_lost_host_is_an_error_and_others_go_on(lent_lab: Lab, own_pool: Callable[..., sky.Compute]) -> None:
    pool = own_pool(2, lease=3, heartbeat_timeout=2)
    first, second = (pool.device("cpu", on=host.name) for host in pool.hosts)
    a, b = torch.ones(2, device=first), torch.ones(2, device=second)
    assert a.sum().item() == 2
    lent_lab[pool.hosts[0].name].cut()

    def go_on() -> None:
        for _ in range(10_000):
            a.add_(1)
            time.sleep(0.01)

    with pytest.raises(sky.HostLost):
        go_on()
    assert (b + 1).tolist() == [2, 2]


@pytest.mark.slow
def test_a_closed_pool(own_pool: Callable[..., sky.Compute]) -> None:
    pool = own_pool()
    tensor = torch.ones(2, device=pool.device("cpu"))
    pool.close()
    with pytest.raises(sky.UsageError, match="closed"):
        tensor.sum().item()
    with pytest.raises(sky.UsageError, match="not open"):
        pool.device("cpu")
    del tensor
    with torch.random.fork_rng(devices=range(torch.sky.device_count()), device_type="sky"):
        torch.manual_seed(1)


def test_a_host_without_torch_says_what_to_write(hosts_of: Callable[..., list[sky.Host]]) -> None:
    with sky.Compute(hosts_of("openssh", 1), ui="none") as pool:
        with pytest.raises(sky.HostUnfit, match="no torch") as caught:
            pool.device("cpu")
        assert "plugins=[sky.plugins.torch()]" in str(caught.value.hint)


def test_what_a_device_cannot_be(remote_pool: sky.Compute) -> None:
    with pytest.raises(sky.HostUnfit, match="no GPU"):
        remote_pool.device("cuda")
    for kind in ("tpu", "cuda:x", "cpu:1", ""):
        with pytest.raises(sky.UsageError, match="unknown device"):
            remote_pool.device(kind)
    with pytest.raises(sky.UsageError, match="no host"):
        remote_pool.device("cpu", on="unknown")
    assert remote_pool.device() == remote_pool.device("cpu") == remote_pool.hosts[0].device()
    assert remote_pool.hosts[1].device("cpu") == remote_pool.device("cpu", on=remote_pool.hosts[1].name)


# ---- threads, forks, numbers


def test_the_number_of_remote_tensors_stays(device: Any) -> None:
    model = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(2, 4, device=device)

    def train(number: int) -> int:
        for _ in range(number):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        gc.collect()  # tensors that other tests have left are deleted when Python finds them
        return sky.memory(device)["tensors"]

    before = train(20)
    assert train(60) == before
