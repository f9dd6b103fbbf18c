"""Functions and modules that run as a whole on the host of a device."""

from __future__ import annotations

import copy
import gc
import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import skyfab as sky
from skyfab.protocol import codec

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

pytestmark = pytest.mark.lab


def test_a_function_has_remote_tensors_as_its_own(device: Any) -> None:
    a = torch.arange(6.0).view(2, 3).to(device)

    def work(x: Any, scale: float) -> Any:
        assert x.device.type != "sky"
        return {"product": x @ x.T * scale, "rows": len(x), "parts": [x[0], None, "text"]}

    found = sky.run_on(device, work, a, scale=2.0)
    assert found["product"].device == device
    assert torch.equal(found["product"].cpu(), a.cpu() @ a.cpu().T * 2)
    assert (found["rows"], found["parts"][1:]) == (2, [None, "text"])
    assert found["parts"][0].tolist() == [0, 1, 2]


def test_a_function_changes_a_remote_tensor(device: Any) -> None:
    a = torch.zeros(3, device=device)

    def change(x: Any) -> None:
        x.add_(1)

    assert sky.run_on(device, change, a[:2]) is None
    assert a.tolist() == [1, 1, 0]


def test_what_a_function_raises(device: Any) -> None:
    def fail() -> None:
        raise KeyError("no such weight")

    with pytest.raises(sky.DeviceError, match="no such weight"):
        sky.run_on(device, fail)
    with pytest.raises(sky.DeviceError, match="cannot contain"):
        sky.run_on(device, lambda: {1, 2})
    with pytest.raises(sky.UsageError, match="not a remote device"):
        sky.run_on(torch.device("cpu"), fail)
    assert sky.run_on(device, lambda: 1) == 1


def test_a_module_that_was_imported_after_the_device_was_opened(
    remote_pool: sky.Compute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_late.py").write_text("def one():\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    late = importlib.import_module("imported_late")
    with pytest.raises(sky.DeviceError, match="No module named 'imported_late'") as error:
        sky.run_on(remote_pool.device("cpu"), late.one)
    assert "was imported later, close the pool and open it again" in str(error.value.hint)


def test_tensors_of_other_devices_are_refused(device: Any, other: Any) -> None:
    with pytest.raises(sky.UsageError, match=str(other)):
        sky.run_on(device, lambda x: x, torch.ones(1, device=other))


def test_a_call_runs_where_its_first_tensor_is(device: Any, other: Any) -> None:
    """Of the devices that may be meant; tensors of others are copied."""
    from skyfab.device import remote_functions, tensors

    here, there = tensors.streams[device.index], tensors.streams[other.index]
    a, b = torch.ones(2, device=device), torch.zeros(2, device=other)
    assert remote_functions.find([1, {"x": a}, b], [here, there]) is here
    assert remote_functions.find((b, a), [here, there]) is there
    assert remote_functions.find((b, a), [here]) is here
    for value in ([1, torch.zeros(2)], [1, b]):
        found = remote_functions.find(value, [here])
        assert isinstance(found, codec.Payload)
        number, tensor = codec.loads(found.data, found.buffers)
        assert (number, tensor.device.type, tensor.tolist()) == (1, "cpu", [0, 0])


def test_weights_are_loaded_there(device: Any) -> None:
    def weights() -> Any:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    with torch.device("meta"):
        model = weights()
    model.load_state_dict(sky.load_on(device, weights), assign=True)
    assert {parameter.device for parameter in model.parameters()} == {device}
    x = torch.randn(5, 4)
    torch.testing.assert_close(model(x.to(device)).cpu(), weights()(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x.to(device)).sum().backward()
    optimizer.step()
    with pytest.raises(sky.UsageError, match="not a module or a state dict"):
        sky.load_on(device, lambda: 3)


def test_a_generator_yields_as_the_values_come(device: Any) -> None:
    a = torch.ones(2, device=device)

    def tokens(x: Any, count: int) -> Iterator[Any]:
        for number in range(count):
            x = x + 1
            yield number, x

    found = list(sky.run_on(device, tokens, a, 40))
    assert [number for number, _ in found] == list(range(40))
    assert found[-1][1].tolist() == [41, 41]
    endless = sky.run_on(device, tokens, a, 10**9)
    assert [next(endless)[0] for _ in range(3)] == [0, 1, 2]
    endless.close()
    assert list(endless) == []
    assert a.tolist() == [1, 1]


def _count(number: int) -> Iterator[int]:
    yield from range(number)


def test_several_threads_read_a_generator(device: Any) -> None:
    values = sky.run_on(device, _count, 2000)
    with ThreadPoolExecutor(4) as threads:
        parts = list(threads.map(list, [values] * 4))
    assert sorted(value for part in parts for value in part) == list(range(2000))


def test_values_that_were_asked_for_ahead_are_freed(device: Any) -> None:
    def tensors() -> Iterator[Any]:
        while True:
            time.sleep(0.01)
            yield torch.ones(3)

    before = sky.memory(device)["tensors"]
    found = sky.run_on(device, tensors)
    assert next(found).tolist() == [1, 1, 1]
    found.close()
    assert sky.memory(device)["tensors"] == before


@pytest.mark.parametrize("early", [False, True])
def test_a_generator_that_raises(device: Any, monkeypatch: pytest.MonkeyPatch, early: bool) -> None:
    """Also if that is known before all values are asked for."""
    from skyfab.device import tensors

    stream = tensors.streams[device.index]
    start = stream.start

    def tokens() -> Iterator[int]:
        yield 1
        raise ValueError("out of words")

    def start_and_wait(*instruction: Any) -> Any:
        batch = start(*instruction)
        stream.wait(batch, None)
        return batch

    if early:
        monkeypatch.setattr(stream, "start", start_and_wait)
    found = sky.run_on(device, tokens)
    assert next(found) == 1
    with pytest.raises(sky.DeviceError, match="out of words"):
        next(found)
    assert torch.ones(2, device=device).sum().item() == 2


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "autocast"])
def test_what_a_generator_sets_for_its_thread_is_its_own(device: Any, mode: str) -> None:
    def modes() -> Iterator[tuple[bool, bool, bool]]:
        with torch.autocast("cpu", torch.bfloat16) if mode == "autocast" else getattr(torch, mode)():
            while True:
                time.sleep(0.05)  # a reply for each value
                yield torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")

    expected = (mode == "autocast", mode == "inference_mode", mode == "autocast")
    a = torch.ones(2, 2, device=device)
    found = sky.run_on(device, modes)
    for _ in range(8):
        assert next(found) == expected
        product = a @ a
        assert product.tolist() == [[2, 2], [2, 2]]
        assert not any(sky.run_on(device, lambda x: (x.is_inference(), torch.is_autocast_enabled("cpu")), product))
    found.close()
    sky.synchronize()
    assert sky.run_on(device, lambda: (torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"))) == (
        False,
        False,
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x: Any, *, scale: float = 1.0) -> Any:
        hidden = self.norm(self.first(x)).relu()
        return {"out": self.second(hidden) * scale, "hidden": (hidden,)}


def test_a_module_is_one_instruction_each_way(device: Any) -> None:
    x = torch.randn(8, 6)
    torch.manual_seed(0)
    here = Block()
    torch.manual_seed(0)
    there = Block().to(device)
    fast = sky.remote(there)
    losses = []
    for model, inputs in ((here, x), (fast, x.to(device))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses.append([])
        for _ in range(4):
            optimizer.zero_grad()
            with sky.device.profile() as forward:
                found = model(inputs, scale=2.0)
                loss = found["out"].pow(2).mean() + found["hidden"][0].sum() * 0.01
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert forward.operations + forward.others < 12
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    torch.testing.assert_close(there.norm.running_mean.cpu(), here.norm.running_mean)
    here.eval()
    fast.eval()
    with torch.no_grad():
        torch.testing.assert_close(fast(x.to(device))["out"].cpu(), here(x)["out"], rtol=1e-3, atol=1e-4)


def test_gradients_reach_the_input_of_a_remote_module(device: Any) -> None:
    module = nn.Linear(3, 3).to(device)
    x = torch.randn(2, 3).to(device).requires_grad_()
    sky.remote(module)(x).sum().backward()
    expected = module.weight.detach().cpu().sum(0).expand(2, 3)
    torch.testing.assert_close(x.grad.cpu(), expected)


class Scaled(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2, bias=False)
        self.scale: Any = 1.0

    def forward(self, x: Any) -> Any:
        return self.inner(x) * self.scale


def test_plain_attributes_of_a_remote_module_may_change(device: Any) -> None:
    module = Scaled().to(device)
    remote, x = sky.remote(module), torch.ones(1, 2, device=device)
    once = remote(x).cpu()
    module.scale = 2.0
    assert torch.equal(remote(x).cpu(), once * 2)
    module.scale = 1.0
    assert torch.equal(remote(x).cpu(), once)
    for number in range(3, 65):
        module.scale = float(number)
        remote(x)
    module.scale = 65.0
    with pytest.raises(sky.UsageError, match="changed 64 times"):
        remote(x)


class _Tied(torch.nn.Module):
    """Two layers with one weight, and a count that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.second(self.first(x))


def test_a_remote_module_with_shared_weights_that_gets_one_more(device: Any) -> None:
    torch.manual_seed(0)
    expected = _Tied()
    tied = copy.deepcopy(expected).to(device)
    remote = sky.remote(tied)
    x = torch.randn(2, 3)
    for module in (expected, tied):
        assert module.first.weight is module.second.weight
    expected(x).sum().backward()
    remote(x.to(device)).sum().backward()
    torch.testing.assert_close(tied.first.weight.grad.cpu(), expected.first.weight.grad)
    for module in (expected, tied):
        module.second.weight = torch.nn.Parameter(module.first.weight.detach() * 2)
    torch.testing.assert_close(remote(x.to(device)).cpu(), expected(x))
    assert tied.count.item() == 2


class _Parts(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(3, 3, bias=False) for _ in range(3))
        self.act = nn.Tanh()
        self.number: Any = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = {int: 0, float: 1, bool: 2}[type(self.number)]
        return self.third(self.second(self.first(self.act(x)))) + kind + math.copysign(1, self.number)


def _other_sharing(module: Any) -> None:
    module.third.weight, module.first.weight = module.second.weight, nn.Parameter(module.first.weight * 2)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a part of another type": lambda module: setattr(module, "act", nn.Sigmoid()),
    "a float": lambda module: setattr(module, "number", 2.0),
    "a bool": lambda module: setattr(module, "number", True),
    "zero": lambda module: setattr(module, "number", 0.0),
    "negative zero": lambda module: setattr(module, "number", -0.0),
    "a hook": lambda module: module.act.register_forward_hook(lambda part, args, out: out * 2),
    "a hook before": lambda module: module.act.register_forward_pre_hook(lambda part, args: (args[0] * 3,)),
    "shared parts": lambda module: setattr(module, "third", module.second),
    "shared weights": lambda module: setattr(module.third, "weight", module.first.weight),
    "other shared weights": _other_sharing,
}


def test_a_remote_module_that_is_changed(device: Any) -> None:
    here = _Parts()
    there = copy.deepcopy(here).to(device)
    remote, x = sky.remote(there), torch.randn(2, 3)
    for change in (None, *CHANGES):
        for module in (here, there):
            if change is not None:
                CHANGES[change](module)
        torch.testing.assert_close(remote(x.to(device)).cpu(), here(x), msg=change)


class _Counting(nn.Module):  # type: ignore[misc, name-defined]
    """Its forward puts another tensor in place of a buffer."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, more: Any = 1.0) -> torch.Tensor:
        self.count = self.count + more
        return self.inner(x) * self.count


def test_a_remote_module_that_replaces_a_buffer(device: Any) -> None:
    module = _Counting().to(device)
    remote, x = sky.remote(module), torch.ones(1, 2, device=device)
    first = remote(x)
    first.sum().backward()
    assert torch.equal((remote(x) / 2).cpu(), first.cpu())
    assert module.count.item() == 2
    with pytest.raises(sky.DeviceError, match="forward has replaced 'count' by something of another shape"):
        remote(x, torch.ones(1, 2, device=device))
    assert module.count.item() == 2


def _exits(number: int) -> Iterator[int]:
    yield number
    sys.exit(number)


def test_a_function_that_exits_is_an_error(device: Any) -> None:
    x = torch.ones(2, device=device)
    with pytest.raises(sky.DeviceError, match="SystemExit: 3"):
        sky.run_on(device, sys.exit, 3)
    values = sky.run_on(device, _exits, 4)
    assert next(values) == 4
    with pytest.raises(sky.DeviceError, match="SystemExit: 4"):
        next(values)
    assert x.tolist() == [1, 1]


def test_a_module_that_changes_a_leaf_without_gradients(device: Any) -> None:
    here = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3))
    there = sky.remote(copy.deepcopy(here).to(device))
    x = torch.randn(2, 3, requires_grad=True)
    leaf = x.detach().to(device).requires_grad_()
    with torch.no_grad():
        expected = here(x)
        for _ in range(2):
            torch.testing.assert_close(there(leaf).cpu(), expected)
        torch.testing.assert_close(leaf.cpu(), x)


def test_a_tensor_of_this_machine_that_requires_a_gradient_is_refused(device: Any) -> None:
    remote = sky.remote(nn.Linear(2, 2).to(device))
    with pytest.raises(RuntimeError, match="expected all tensors"):
        remote(torch.ones(2, requires_grad=True))


def test_autograd_knows_what_a_remote_module_changes(device: Any) -> None:
    module = nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(2)).to(device)
    remote, w = sky.remote(module), torch.ones(2, device=device, requires_grad=True)
    for calls in range(1, 4):
        x = torch.randn(3, 2, device=device)
        product = x * w
        remote(x).sum().backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
        assert x.min().item() >= 0
        assert module[1].num_batches_tracked._version >= calls


class _Some(nn.Module):  # type: ignore[misc, name-defined]
    """The shape of its result, or its strides, depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.arange(6.0)[: int(x.abs())].view(2, -1)
        return found if x > 0 else found.t().contiguous().t()


def test_a_result_whose_layout_depends_on_values(device: Any) -> None:
    remote = sky.remote(_Some().to(device))
    for _ in range(3):
        assert remote(torch.tensor([4.0], device=device)).tolist() == [[0, 1], [2, 3]]
    assert remote(torch.tensor([-4.0], device=device)).tolist() == [[0, 1], [2, 3]]
    with pytest.raises(sky.DeviceError, match=r"float32\[2, 3\], expected float32\[2, 2\]"):
        remote(torch.tensor([6.0], device=device)).cpu()


class _Signs(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, number: Any) -> torch.Tensor:
        if isinstance(number, torch.Tensor):
            return x * number.to(x.device)
        return x * math.copysign(1, number.real) * math.copysign(2, number.imag)


def test_zeros_with_signs_are_different_arguments(device: Any) -> None:
    remote, x = sky.remote(_Signs().to(device)), torch.ones(1, device=device)
    numbers = [0.0, -0.0, complex(0.0, 0.0), complex(0.0, -0.0), 0]
    assert [remote(x, number).item() for number in numbers] == [2, -2, 2, -2, 2]
    signs = [torch.signbit(remote(x, torch.tensor([number]))).item() for number in (0.0, -0.0, 0.0)]
    assert signs == [False, True, False]
    for number in (0.0, -0.0):
        found = torch.linspace(number, -1.0, 2, device=device)
        assert torch.equal(found.cpu().signbit(), torch.linspace(number, -1.0, 2).signbit())


def test_nan_is_one_argument(device: Any, syncs: Callable[[], int]) -> None:
    remote, x = sky.remote(_Signs().to(device)), torch.ones(1, device=device)
    found = [remote(x, float("nan")), remote(x, torch.tensor([math.nan]))]
    before = syncs()
    found += [remote(x, float("nan")), remote(x, torch.tensor([math.nan]))]
    assert syncs() == before
    assert [value.isnan().item() for value in found] == [False, True, False, True]


class _Filled(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.device: Any = None

    def forward(self, device: Any = None, **more: Any) -> torch.Tensor:
        return torch.ones(2, device=device or self.device) * more.get("by", 1)


class _Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_what_cannot_be_an_argument_of_a_remote_module(device: Any) -> None:
    """Nothing is sent: the device and its tensors stay usable. Objects would be as they were in the first call."""
    remote, kept = sky.remote(_Filled().to(device)), torch.ones(2, device=device)
    for value in (lambda: 1, _Holder(1), _Holder(kept), {1, 2}, {_Holder: 1}, [sky], remote):
        with pytest.raises(sky.UsageError, match="unsupported type of an argument"):
            remote(device=device, other=value)
    assert remote(by=3, other=(b"", "", None, 1j, torch.float16, torch.contiguous_format)).tolist() == [3, 3]
    assert kept.tolist() == [1, 1]


def test_the_device_is_that_of_the_host_there(device: Any, other: Any) -> None:
    """In arguments and attributes of modules, and in arguments of functions."""
    remote = sky.remote(module := _Filled().to(device))
    for _ in range(2):
        assert (made := remote(device=device)).tolist() == [1, 1]
        assert made.device == device
    module.device = device
    assert sky.remote(module)(by=2).tolist() == [2, 2]
    assert sky.run_on(device, lambda where: torch.ones(2, device=where), device).tolist() == [1, 1]
    for call in (lambda: remote(device=other), lambda: sky.run_on(device, print, other)):
        with pytest.raises(sky.UsageError, match=str(other)):
            call()


def test_a_remote_module_needs_a_remote_device() -> None:
    with pytest.raises(sky.UsageError, match="one remote device"):
        sky.remote(nn.Linear(2, 2))


def test_a_module_sees_what_an_optimizer_does(device: Any, syncs: Callable[[], int]) -> None:
    module = nn.Linear(3, 1, bias=False).to(device)
    fast = sky.remote(module)
    x = torch.ones(1, 3, device=device)
    fast(x)
    before = syncs()
    with torch.no_grad():
        module.weight.fill_(2)
    out = fast(x)
    assert syncs() == before
    assert out.item() == 6


def failing_fetch(device: Any) -> Any:
    """The future of a value that the host fails to compute, which it has not said yet: else `fetch` would raise."""
    from skyfab.device import tensors

    with tensors.streams[device.index]._lock:  # nothing is sent by itself meanwhile
        return sky.fetch(torch.linalg.cholesky(-torch.eye(2, device=device)))


def test_an_error_is_raised_by_a_fetch_whose_result_is_asked_for_and_not_again(device: Any) -> None:
    future = failing_fetch(device)
    with pytest.raises(sky.DeviceError, match="not positive-definite"):
        future.result(170)
    assert torch.ones(2, device=device).tolist() == [1, 1]


def test_an_error_is_raised_by_the_next_wait_if_no_fetch_is_asked(device: Any) -> None:
    future = failing_fetch(device)
    with pytest.raises(sky.DeviceError, match="not positive-definite"):
        sky.synchronize()
    assert torch.ones(2, device=device).tolist() == [1, 1]
    with pytest.raises(sky.DeviceError):
        future.result(170)
    assert torch.ones(2, device=device).tolist() == [1, 1]


def test_values_are_fetched_while_the_program_goes_on(device: Any) -> None:
    a = torch.arange(10.0).to(device)
    future = sky.fetch(a)
    a.add_(1)
    assert future.result(170).tolist() == list(range(10))
    assert a[0].item() == 1


def test_a_loader_is_read_ahead(device: Any) -> None:
    batches = [(torch.full((2,), float(n)), {"label": n}) for n in range(5)]
    found = list(sky.prefetch(batches, device))
    assert [x.tolist() for x, _ in found] == [[n, n] for n in range(5)]
    assert [about["label"] for _, about in found] == list(range(5))
    assert found[0][0].device == device
    with pytest.raises(sky.UsageError, match="depth"):
        next(sky.prefetch(batches, device, depth=0))


def test_memory(device: Any) -> None:
    gc.collect()  # tensors of the tests before, here and there
    sky.run_on(device, gc.collect)
    sky.synchronize()
    before = sky.memory(device)
    big = torch.zeros(1 << 20, device=device)
    now = sky.memory(device)
    assert now["allocated"] - before["allocated"] == 4 << 20
    assert now["tensors"] == before["tensors"] + 1
    assert 0 < now["free"] <= now["total"]
    del big
    assert sky.memory(device)["allocated"] == before["allocated"]
    sky.synchronize()
