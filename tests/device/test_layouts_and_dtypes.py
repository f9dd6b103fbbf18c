"""Where PyTorch's meta device differs from kernels: layouts, dtypes; and what PyTorch asks of an accelerator."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import skyfab as sky

torch = pytest.importorskip("torch")
nn = torch.nn
F = torch.nn.functional


def test_convolutions_keep_channels_last(device: Any) -> None:
    for layer, shape, memory_format in (
        (nn.Conv2d(3, 5, 3), (2, 3, 8, 8), torch.channels_last),
        (nn.ConvTranspose2d(3, 5, 3), (2, 3, 8, 8), torch.channels_last),
        (nn.Conv3d(3, 5, 3), (2, 3, 4, 8, 8), torch.channels_last_3d),
        (nn.Conv2d(3, 5, 3), (2, 3, 8, 8), torch.contiguous_format),
    ):
        x, found = torch.randn(shape).to(memory_format=memory_format), []
        layer = layer.to(memory_format=memory_format)
        for where in ("cpu", device):
            layer = layer.to(where)
            given = x.to(where).detach().requires_grad_()
            y = layer(given)
            y.pow(2).sum().backward()
            found.append((y, given.grad, layer.weight.grad.cpu()))
            layer.zero_grad()
        for here, there in zip(*found, strict=True):
            torch.testing.assert_close(there.cpu(), here)
        assert all(one.is_contiguous(memory_format=memory_format) for one in found[1][:2])


def test_what_torch_accelerator_asks(device: Any) -> None:
    kept = torch.ones(1000, device=device)
    torch.accelerator.synchronize()
    torch.accelerator.synchronize(device)
    assert torch.accelerator.memory_allocated(device) == sky.memory(device)["allocated"] >= kept.nbytes
    free, total = torch.accelerator.get_memory_info(device)
    assert 0 < free < total
    torch.accelerator.empty_cache()
    with pytest.raises(NotImplementedError, match=r"does not count allocated_bytes\.all\.peak"):
        torch.accelerator.max_memory_allocated(device)


def test_an_error_is_also_of_the_type_that_the_host_raised(device: Any) -> None:
    table, wrong = torch.zeros(3, device=device), torch.tensor([9], device=device)
    with pytest.raises(IndexError, match="out of bounds") as caught:
        table[wrong].sum().item()
    assert isinstance(caught.value, sky.DeviceError)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copied, IndexError) and str(copied) == str(caught.value)
    with pytest.raises(ZeroDivisionError) as divided:
        sky.run_on(device, lambda: 1 // 0)
    assert isinstance(divided.value, sky.DeviceError)
    with pytest.raises(sky.DeviceError) as other:
        sky.run_on(device, lambda: [].missing)  # type: ignore[attr-defined]
    assert not isinstance(other.value, AttributeError)


def _ones(device: Any, *shape: int, dtype: Any = torch.float32) -> Any:
    return torch.ones(shape, dtype=dtype, device=device)


WRONG = {
    "cast": lambda d: _ones(d, 2, dtype=torch.int64).mul_(0.5),
    "cast complex": lambda d: _ones(d, 2).add_(_ones(d, 2, dtype=torch.complex64)),
    "bool - 2": lambda d: _ones(d, 2, dtype=torch.bool) - 2,
    "max": lambda d: _ones(d, 2, dtype=torch.complex64).max(0),
    "target": lambda d: F.cross_entropy(_ones(d, 2, 3), _ones(d, 2, dtype=torch.int32)),
    "index_add_": lambda d: _ones(d, 3).index_add_(0, _ones(d, 3, dtype=torch.int64), _ones(d, 3, dtype=torch.float64)),
    "bce": lambda d: F.binary_cross_entropy(_ones(d, 3), _ones(d, 3, dtype=torch.int64)),
    "linear": lambda d: nn.Linear(3, 3, device=d)(_ones(d, 2, 3, dtype=torch.float64)),
    "mask": lambda d: _ones(d, 2).masked_fill_(_ones(d, 2), 1),
    "multinomial": lambda d: torch.multinomial(_ones(d, 3, dtype=torch.int64), 1),
}


@pytest.mark.parametrize("name", WRONG)
def test_dtypes_that_kernels_refuse_raise_in_their_line(device: Any, name: str) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        WRONG[name]("cpu")
    with pytest.raises((RuntimeError, TypeError)) as caught:
        WRONG[name](device)
    assert not isinstance(caught.value, sky.DeviceError)
    sky.synchronize()
