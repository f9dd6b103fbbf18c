"""Calls with remote tensors among their arguments, and calls whose results stay on a host."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from stage.threads import at_once

import skyfab as sky
from skyfab.lab import Lab

torch = pytest.importorskip("torch")
nn = torch.nn

pytestmark = [pytest.mark.lab, pytest.mark.slow]


@sky.function
def where(*values: Any) -> tuple[str, int, list[str]]:
    """The host, the process, and the devices of tensors, as the function sees them."""
    return sky.instance_info().hostname, os.getpid(), [value.device.type for value in values]


@sky.function
def process_of(*args: Any, **kwargs: Any) -> int:
    return os.getpid()


@sky.function
def add(tensor: Any, number: float) -> float:
    tensor.add_(number)
    return float(tensor.sum())


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any


def worker_of(device: Any) -> int:
    """The process of a device's worker."""
    return sky.run_on(device, os.getpid)


@pytest.fixture(scope="module")
def own_pool(lent_lab: Lab) -> Iterator[sky.Compute]:
    """One host, for tests that end the worker of its device."""
    inventory = sky.Inventory.of(lent_lab.inventory)
    with sky.Compute(list(inventory.hosts.values())[2:3], ui="none") as pool:
        yield pool


# ---- remote tensors as arguments


def test_a_remote_tensor_is_the_hosts_own(remote_pool: sky.Compute, device: Any) -> None:
    x = torch.zeros(4, device=device)
    name, process, kinds = where(x) >> remote_pool
    assert (process, kinds) == (worker_of(device), ["cpu"])
    assert name == remote_pool.hosts[0].agent.hostname
    assert add(x[1:3], 2.0) >> remote_pool == 4
    assert x.tolist() == [0, 2, 2, 0]
    assert (add(x, 1.0) > remote_pool).result(170) == 8
    assert x.tolist() == [1, 3, 3, 1]


def test_a_call_runs_in_order_with_operations(remote_pool: sky.Compute, device: Any) -> None:
    """Nothing waits for the host between them: the numbers are right because of the order."""
    x = torch.ones(3, device=device)
    x.mul_(2)
    first = remote_pool.submit(add(x, 1.0))
    x.mul_(10)
    second = remote_pool.submit(add(x, 1.0))
    x.zero_()
    assert (first.result(170), second.result(170)) == (9, 93)
    assert x.tolist() == [0, 0, 0]


def test_tensors_are_found_wherever_pickle_finds_them(remote_pool: sky.Compute, device: Any) -> None:
    x, used = torch.zeros(2, device=device), torch.zeros(2, device=device)

    @sky.function
    def change(pair: Any, *, more: Any) -> Any:
        used.add_(5)
        pair.left["deep"][0].add_(1)
        more[0].add_(2)
        return pair.left["deep"][0] is more[0], more[1].data_ptr() == more[0].data_ptr(), os.getpid()

    again, shared, process = change(Pair({"deep": [x]}, None), more=(x, x[:1])) >> remote_pool
    assert (again, shared, process) == (True, True, worker_of(device))
    assert (x.tolist(), used.tolist()) == ([3, 3], [5, 5])


def test_a_module_with_remote_parameters(remote_pool: sky.Compute, device: Any) -> None:
    """It is trained there, by an optimizer of the call's own. Tied weights are one parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    x, y = torch.randn(16, 4), torch.randn(16, 4)

    @sky.function
    def train(model: Any, x: Any, y: Any, steps: int) -> tuple[float, int]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (model(x) - y).pow(2).mean()
            loss.backward()
            optimizer.step()
        return loss.item(), len(list(model.parameters()))

    here = torch.nn.utils.parameters_to_vector(model.parameters()).clone()
    model.to(device)
    loss, count = train(model, x.to(device), y.to(device), 5) >> remote_pool
    assert count == 3
    model.cpu()
    assert not torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()), here)
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(here, model.parameters())
    assert train.fn(model, x, y, 5)[0] == pytest.approx(loss, rel=1e-4)


def test_gradients_end_at_a_call(remote_pool: sky.Compute, device: Any) -> None:
    """A tensor that requires a gradient does so there, as a leaf; its gradient there is not the one here."""
    x = torch.ones(3).to(device).requires_grad_()
    y = x * 2

    @sky.function
    def work(x: Any, y: Any) -> Any:
        assert x.requires_grad
        assert y.requires_grad
        assert x.is_leaf
        assert y.is_leaf
        (x * y).sum().backward()
        return x.grad, (x * 3).sum()

    grad, total = remote_pool.submit(work(x, y), keep=True).result(170)
    assert (grad.tolist(), total.item()) == ([2, 2, 2], 9)
    assert not total.requires_grad
    assert x.grad is None
    y.sum().backward()
    assert x.grad.tolist() == [2, 2, 2]  # type: ignore[attr-defined]


def test_a_result_is_a_value(remote_pool: sky.Compute, device: Any) -> None:
    x = torch.arange(3.0).to(device)

    @sky.function
    def double(x: Any) -> Any:
        return Pair(x * 2, {"a", "set"})

    found = double(x) >> remote_pool
    assert found == Pair(found.left, {"a", "set"})
    assert (found.left.device.type, found.left.tolist()) == ("cpu", [0, 2, 4])


def test_calls_without_remote_tensors_run_elsewhere(remote_pool: sky.Compute, device: Any) -> None:
    workers = {call >> remote_pool for call in (process_of(), process_of(torch.ones(2)), process_of("x", y=[1]))}
    assert worker_of(device) not in workers


def test_an_async_function_and_its_output(remote_pool: sky.Compute, device: Any) -> None:
    x = torch.ones(2, device=device)
    events: list[Any] = []
    stop = remote_pool.events.subscribe(events.append)

    @sky.function
    async def talk(x: Any) -> float:
        print("sum", x.sum().item())
        return x.sum().item()

    assert talk(x) >> remote_pool == 2
    stop()
    lines = [str(event) for event in events]
    assert not any("project files" in line for line in lines)
    assert f"{remote_pool.hosts[0].name} sum 2.0" in lines
    started, ended = (event for event in events if hasattr(event, "call"))
    assert "talk" in started.function
    assert (ended.call, ended.error) == (started.call, None)


def test_changed_files_are_reported(remote_pool: sky.Compute, device: Any) -> None:
    """The worker of a device keeps the code that it has, and a notice says so once."""
    link: Any = remote_pool._devices.streams[remote_pool.hosts[0].name, "cpu"].link
    link.tree = "another"  # as if a file had been edited since the device was opened
    events: list[Any] = []
    stop = remote_pool.events.subscribe(events.append)
    for _ in range(2):
        process_of(torch.ones(2, device=device)) >> remote_pool
    stop()
    assert sum("project files changed" in str(event) for event in events) == 1


# ---- several hosts


def test_a_broadcast_has_copies(remote_pool: sky.Compute, device: Any) -> None:
    x = torch.ones(2, device=device)
    assert add(x, 1.0) @ remote_pool == [4, 4]
    assert x.tolist() == [1, 1]


def test_a_call_to_another_host_has_copies(remote_pool: sky.Compute, device: Any, other: Any) -> None:
    x, y = torch.ones(2, device=device), torch.ones(2, device=other)
    second = remote_pool.hosts[1].name
    assert remote_pool.submit(add(x, 1.0), on=second).result(170) == 4
    assert x.tolist() == [1, 1]
    assert remote_pool.submit(add(y, 1.0), on=second).result(170) == 4
    assert y.tolist() == [2, 2]
    assert remote_pool.submit(add(x, 1.0), on="head").result(170) == 4
    assert x.tolist() == [2, 2]


def test_tensors_of_two_devices(remote_pool: sky.Compute, device: Any, other: Any) -> None:
    """Where a host is named, its tensors are themselves and others are copies; else it is not clear where to run it."""
    x, y = torch.ones(2, device=device), torch.ones(2, device=other)

    @sky.function
    def mix(x: Any, y: Any) -> float:
        return float((x.add_(1) * y.add_(1)).sum())

    with pytest.raises(sky.UsageError, match=str(other)) as caught:
        mix(x, y) >> remote_pool
    assert ".cpu()" in str(caught.value.hint)
    assert remote_pool.submit(mix(x, y), on=remote_pool.hosts[1].name).result(170) == 8
    assert (x.tolist(), y.tolist()) == ([1, 1], [2, 2])


def test_tensors_of_another_pool_are_copies(remote_pool: sky.Compute, own_pool: sky.Compute, device: Any) -> None:
    x, y = torch.ones(2, device=device), torch.zeros(2, device=own_pool.device("cpu"))

    @sky.function
    def into(x: Any, y: Any) -> int:
        y.copy_(x.add_(1))
        return os.getpid()

    assert into(x, y) >> own_pool == worker_of(y.device)
    assert (x.tolist(), y.tolist()) == ([1, 1], [2, 2])


# ---- results that stay


def test_a_result_stays_there(remote_pool: sky.Compute, device: Any, syncs: Callable[[], int]) -> None:
    x = torch.arange(4.0).to(device)

    @sky.function
    def statistics(x: Any, names: list[str]) -> Any:
        return {"sum": x.sum(), "parts": (x[:2] * 2, [None, 1.5, *names])}

    before = syncs()
    found = remote_pool.submit(statistics(x, ["a"]), keep=True).result(170)
    assert syncs() == before
    assert found["sum"].device == found["parts"][0].device == device
    assert ((found["sum"] + 1).item(), found["parts"][0].tolist()) == (7, [0, 2])
    assert found["parts"][1] == [None, 1.5, "a"]


def test_a_result_stays_on_the_host_that_is_named(remote_pool: sky.Compute, device: Any, other: Any) -> None:
    @sky.function
    def make(number: int) -> Any:
        return torch.full((2,), number)

    second = remote_pool.hosts[1].name
    assert remote_pool.submit(make(1), keep=True).result(170).device == device
    assert remote_pool.submit(make(1), keep=True, on="head").result(170).device == device
    made = remote_pool.submit(make(3), keep=True, on=second).result(170)
    assert (made.device, made.tolist()) == (other, [3, 3])
    with pytest.raises(sky.UsageError, match="for a call to one host"):
        remote_pool.submit(make(1), keep=True, on="all")


def test_results_are_freed(remote_pool: sky.Compute, device: Any) -> None:
    """Also those that the program did not ask for, and those of calls that were cancelled."""
    x = torch.ones(2, device=device)
    twice = sky.function(lambda x: (x * 2, x * 3))
    remote_pool.submit(twice(x), keep=True).result(170)
    before = sky.memory(device)["tensors"]
    for _ in range(20):
        remote_pool.submit(twice(x), keep=True)
        remote_pool.submit(twice(x), keep=True).cancel()
    sky.synchronize()
    assert sky.memory(device)["tensors"] == before


# ---- what goes wrong


def test_what_a_function_raises_is_raised(remote_pool: sky.Compute, device: Any) -> None:
    """As its own type, with the lines of the function; operations that follow are executed."""
    x = torch.ones(2, device=device)

    @sky.function
    def fail(x: Any) -> None:
        x.add_(1)
        raise KeyError("no such weight")

    for keep in (False, True):
        future = remote_pool.submit(fail(x), keep=keep)
        x.mul_(10)
        with pytest.raises(KeyError, match="no such weight") as caught:
            future.result(170)
        assert isinstance(caught.value.__cause__, sky.RemoteTraceback)
        assert 'raise KeyError("no such weight")' in caught.value.__cause__.text
        assert "skyfab/device" not in caught.value.__cause__.text
    assert x.tolist() == [210, 210]
    with pytest.raises(sky.WorkerDied, match="exit"):
        sky.function(lambda x: sys.exit(3))(x) >> remote_pool
    assert x.tolist() == [210, 210], "only the call has ended"


def test_a_call_after_an_error_is_not_made(remote_pool: sky.Compute, device: Any, failing: Any) -> None:
    """The error is that of the operation, once."""
    x = torch.zeros(3, device=device)
    with failing:
        future = remote_pool.submit(add(x, 1.0))
    with pytest.raises(sky.DeviceError, match="out of bounds"):
        future.result(170)
    assert x.tolist() == [0, 0, 0]


def test_a_worker_that_ends_in_a_call(own_pool: sky.Compute) -> None:
    x = torch.ones(2, device=own_pool.device("cpu"))
    future = own_pool.submit(sky.function(lambda x: os._exit(7))(x))
    behind = own_pool.submit(add(x, 1.0))
    with pytest.raises(sky.WorkerDied) as caught:
        future.result(170)
    assert caught.value.exitcode == 7
    with pytest.raises(sky.WorkerDied):
        behind.result(170)
    with pytest.raises(sky.WorkerDied, match="tensors"):
        x.sum().item()
    with pytest.raises(sky.WorkerDied, match="tensors"):
        add(x, 1.0) >> own_pool
    again = torch.ones(2, device=own_pool.device("cpu"))
    assert add(again, 1.0) >> own_pool == 4
    with pytest.raises(sky.WorkerDied, match="tensors"):
        add(x, 1.0) >> own_pool


def test_a_worker_that_ends_between_calls(own_pool: sky.Compute) -> None:
    """Its tensors are not taken for those of a new worker."""
    device = own_pool.device("cpu")
    x = torch.ones(2, device=device)
    end = sky.function(lambda x: threading.Timer(0.1, os._exit, (7,)).start())
    end(x) >> own_pool
    link = own_pool._devices.streams[own_pool.hosts[0].name, "cpu"].link
    own_pool.hosts[0].session.wait(lambda: not link.is_alive(), 60)
    assert torch.ones(2, device=own_pool.device("cpu")).sum().item() == 2, "asking for it makes a new one"
    with pytest.raises(sky.WorkerDied, match="tensors"):
        x.sum().item()


def test_a_remote_module_on_a_device_that_is_opened_again() -> None:
    with sky.Compute("local", ui="none") as pool, torch.no_grad():
        device = pool.device("cpu")
        module = torch.nn.Linear(2, 2).to(device)
        remote, x = sky.remote(module), torch.ones(1, 2)
        expected = remote(x.to(device)).cpu()
        module.cpu()
        pool.close()
        pool.open()
        assert pool.device("cpu") == device, "it has the same number"
        module.to(device)
        assert torch.equal(remote(x.to(device)).cpu(), expected)


def test_a_timeout_ends_the_worker(own_pool: sky.Compute) -> None:
    x = torch.ones(2, device=own_pool.device("cpu"))

    @sky.function(timeout=1)
    def linger(x: Any) -> None:
        threading.Event().wait()

    with pytest.raises(sky.CallTimeout):
        linger(x) >> own_pool
    with pytest.raises(sky.WorkerDied, match="tensors"):
        x.sum().item()


def test_cancelling_does_not_stop_it(remote_pool: sky.Compute, device: Any) -> None:
    x = torch.ones(2, device=device)
    future = remote_pool.submit(add(x, 1.0))
    assert future.cancel()
    assert x.tolist() == [2, 2]


# ---- threads, and programs without a device


def test_calls_and_operations_from_several_threads(remote_pool: sky.Compute, device: Any) -> None:
    def work(number: int) -> list[float]:
        x = torch.zeros(4, device=device)
        sums = []
        for step in range(20):
            x.add_(number)
            sums.append(remote_pool.submit(add(x[:2], 1.0), keep=step % 2 == 0))
            x.mul_(1)
        return [future.result(170) for future in sums] + x.tolist()

    for number, found in enumerate(at_once(work, range(4), 90)):
        sums = [2.0 * (number + 1) * step for step in range(1, 21)]
        assert found == [*sums, *[20.0 * (number + 1)] * 2, *[20.0 * number] * 2]


def test_a_program_without_a_device_imports_no_torch() -> None:
    code = (
        "import sys, skyfab as sky\n"
        "with sky.device.profile() as found: sky.fetch\n"
        "assert '0 operations' in str(found)\n"
        "with sky.Compute('local', ui='none') as compute:\n"
        "    assert sky.function(len)('four') >> compute == 4\n"
        "    assert compute.submit(sky.function(len)([[1], {}])).result() == 2\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=170)
