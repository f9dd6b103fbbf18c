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


@pytest.mark.parametrize(
    ("left", "right", "ends"),
    [((6, 8), (2, 8, 4), [2, 6]), ((2, 6, 8), (2, 8, 4), None), ((8, 8), (8, 4), [4, 8]), ((2, 8, 8), (8, 8), [4, 8])],
)
def test_grouped_products_of_float32(device: Any, left: Any, right: Any, ends: Any) -> None:
    a, b = torch.randn(left), torch.randn(right)
    offs = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    expected = torch._grouped_mm(a, b, offs=offs)
    found = torch._grouped_mm(a.to(device), b.to(device), offs=None if offs is None else offs.to(device))
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_with_indices_and_offsets_of_two_dtypes(device: Any, mode: str) -> None:
    bag = nn.EmbeddingBag(10, 3, mode=mode)
    indices, offsets = torch.tensor([1, 2, 4]), torch.tensor([0, 2], dtype=torch.int32)
    expected = bag(indices, offsets)
    expected.sum().backward()
    gradient = bag.weight.grad.clone()
    bag.zero_grad()
    bag = bag.to(device)
    found = bag(indices.to(device), offsets.to(device))
    found.sum().backward()
    torch.testing.assert_close(found.cpu(), expected)
    torch.testing.assert_close(bag.weight.grad.cpu(), gradient)


def test_a_generator_that_seeds_itself(device: Any) -> None:
    generator = torch.Generator(device=device)
    seed = generator.seed()
    found = torch.rand(5, device=device, generator=generator)
    again = torch.Generator(device=device).manual_seed(seed)
    assert generator.initial_seed() == seed
    assert torch.equal(found, torch.rand(5, device=device, generator=again))


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


def test_an_expanded_tensor_is_copied_to_itself(device: Any) -> None:
    expanded = torch.arange(3, device=device).expand(2, 3)
    assert expanded.copy_(expanded) is expanded
    assert expanded.tolist() == [[0, 1, 2]] * 2


def _ones(device: Any, *shape: int, dtype: Any = torch.float32) -> Any:
    return torch.ones(shape, dtype=dtype, device=device)


WRONG = {
    "cast": lambda d: _ones(d, 2, dtype=torch.int64).mul_(0.5),
    "cast complex": lambda d: _ones(d, 2).add_(_ones(d, 2, dtype=torch.complex64)),
    "bool - 2": lambda d: _ones(d, 2, dtype=torch.bool) - 2,
    "clamp_": lambda d: _ones(d, 2, dtype=torch.complex64).clamp_(-1, 1),
    "max": lambda d: _ones(d, 2, dtype=torch.complex64).max(0),
    "target": lambda d: F.cross_entropy(_ones(d, 2, 3), _ones(d, 2, dtype=torch.int32)),
    "index_add_": lambda d: _ones(d, 3).index_add_(0, _ones(d, 3, dtype=torch.int64), _ones(d, 3, dtype=torch.float64)),
    "bitwise_and": lambda d: _ones(d, 3).bitwise_and(1),
    "bce": lambda d: F.binary_cross_entropy(_ones(d, 3), _ones(d, 3, dtype=torch.int64)),
    "mse": lambda d: F.mse_loss(_ones(d, 3), _ones(d, 3, dtype=torch.complex64)),
    "linear": lambda d: nn.Linear(3, 3, device=d)(_ones(d, 2, 3, dtype=torch.float64)),
    "layer_norm": lambda d: nn.LayerNorm(3, device=d)(_ones(d, 2, 3, dtype=torch.float64)),
    "mask": lambda d: _ones(d, 2).masked_fill_(_ones(d, 2), 1),
    "multinomial": lambda d: torch.multinomial(_ones(d, 3, dtype=torch.int64), 1),
}


@pytest.mark.parametrize("name", WRONG)
def test_dtypes_that_kernels_refuse_raise_in_their_line(device: Any, name: str) -> None:
    with pytest.raises(RuntimeError):
        WRONG[name]("cpu")
    with pytest.raises(RuntimeError) as caught:
        WRONG[name](device)
    assert not isinstance(caught.value, sky.DeviceError)
    sky.synchronize()


# ---- what PyTorch's own tests have found


@pytest.mark.parametrize("weighted", [False, True])
def test_bags_of_bfloat16(device: Any, weighted: bool) -> None:
    """PyTorch's meta device predicts other shapes for them than for float16; kernels do not."""
    bag = nn.EmbeddingBag(10, 4, mode="sum").bfloat16()
    indices, weights = torch.tensor([[1, 2], [4, 4]]), torch.rand(2, 2).bfloat16()
    found = []
    for where in ("cpu", device):
        bag = bag.to(where)
        result = bag(indices.to(where), per_sample_weights=weights.to(where) if weighted else None)
        result.sum().backward()
        found.append((result.cpu(), bag.weight.grad.cpu()))
        bag.zero_grad()
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("is_batch", [True, False])
def test_pooling_keeps_channels_last(device: Any, dtype: str, is_batch: bool) -> None:
    x = torch.randn(2, 3, 4, 8, 8, dtype=getattr(torch, dtype)).to(memory_format=torch.channels_last_3d)
    x = x if is_batch else x[0]
    found = []
    for where in ("cpu", device):
        given = x.to(where).detach().requires_grad_()
        y, indices = F.max_pool3d(given, 2, return_indices=True)
        y.pow(2).sum().backward()
        assert (y if is_batch else y[None]).is_contiguous(memory_format=torch.channels_last_3d)
        found.append((y.detach().cpu(), indices.cpu(), given.grad.cpu(), y.stride(), given.grad.stride()))
    torch.testing.assert_close(found[1], found[0])


def test_indices_that_cannot_be_used_are_index_errors(device: Any) -> None:
    for where in ("cpu", device):
        x = torch.zeros(5, 5, device=where)
        with pytest.raises(IndexError, match=r"shape mismatch: indexing .* with shapes \[2\], \[3\]"):
            x[[0, 1], [0, 1, 2]]
        with pytest.raises(IndexError, match="must be long, int, byte or bool"):
            x[torch.zeros(2, device=where)]


def test_masks_of_bytes_are_deprecated(device: Any) -> None:
    for where in ("cpu", device):
        x, mask = torch.arange(3, device=where), torch.tensor([1, 0, 1], dtype=torch.uint8).to(where)
        with pytest.warns(UserWarning, match="indexing with dtype torch.uint8 is now deprecated") as warned:
            assert x[mask].tolist() == [0, 2]
        assert warned[0].filename == __file__


def test_targets_of_bytes(device: Any) -> None:
    x, target = torch.randn(3, 4).log_softmax(1), torch.tensor([0, 3, 1], dtype=torch.uint8)
    found = []
    for where in ("cpu", device):
        given = x.to(where).detach().requires_grad_()
        loss = F.nll_loss(given, target.to(where))
        loss.backward()
        found.append((loss.detach().cpu(), given.grad.cpu()))
    torch.testing.assert_close(found[1], found[0])


def test_what_the_meta_device_asserts_is_a_runtime_error(device: Any) -> None:
    with pytest.raises(RuntimeError, match="multi-target not supported"):
        F.nll_loss(torch.randn(3, 4, device=device), torch.zeros(3, 2, dtype=torch.int64, device=device))


def test_sums_over_no_dimensions(device: Any) -> None:
    x = torch.arange(6.0).view(2, 3)
    for keep in (False, True):
        expected = torch.nansum(x, [], keepdim=keep)
        torch.testing.assert_close(torch.nansum(x.to(device), [], keepdim=keep).cpu(), expected)


def test_thresholds_of_an_expanded_tensor(device: Any) -> None:
    """It is the same however often it is done to an element."""
    x = torch.tensor([[-1.0, 2.0]]).to(device).expand(3, 2)
    assert F.threshold_(x, 0.5, 0.5).tolist() == [[0.5, 2.0]] * 3
