"""What a remote device cannot do raises, and nothing that follows is wrong."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import skyfab as sky

torch = pytest.importorskip("torch")
nn = torch.nn

pytestmark = pytest.mark.lab


def test_nothing_is_written_into_this_machines_memory(device: Any) -> None:
    there, here = torch.ones(3, device=device), torch.tensor(1.0)
    for write in (
        lambda: here.add_(there[0]),
        lambda: here.mul_(there[0]),
        lambda: torch.add(there[0], 1, out=here),
        lambda: torch._foreach_add_([here, there], 1),
    ):
        with pytest.raises(RuntimeError, match="cannot write into one on cpu"):
            write()
        assert here.item() == 1
    assert here.copy_(there[0] * 2).item() == 2


def test_after_an_error_new_kinds_of_operations_work(device: Any) -> None:
    """What the client has said of plans and views while an error was under way still reaches the host."""
    base = torch.arange(600.0, device=device)

    def fail() -> None:
        torch.arange(3, device=device)[torch.tensor([5], device=device)]
        for size in range(300, 600):
            base[:size].softmax(0)
        sky.synchronize()

    with pytest.raises(sky.DeviceError, match="out of bounds"):
        fail()
    sums = [base[:size].softmax(0).sum() for size in range(300, 600)]
    assert torch.stack(sums).tolist() == pytest.approx([1] * 300)


def test_a_tensor_does_not_leave_those_that_share_its_memory(device: Any) -> None:
    base = torch.arange(4.0, device=device)
    view = base[2:]
    with pytest.raises(RuntimeError, match="share its memory"):
        view.resize_(9)
    assert view.resize_(1).tolist() == [2]
    del view
    assert base.resize_(6)[:4].tolist() == [0, 1, 2, 3]


def test_equal_arguments_of_another_type_are_other_arguments(device: Any) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)

        def forward(self, by: Any) -> Any:
            return self.weight * by

    module = sky.remote(Scale().to(device))
    assert [module(by).dtype for by in (1, 1.0, True, 1)] == [torch.int32, torch.float32, torch.int32, torch.int32]
    ints = torch.ones(2, dtype=torch.int32, device=device)
    results = [torch.full((1,), by, device=device).dtype for by in (1, True, 1.0)]
    assert results == [torch.int64, torch.bool, torch.float32]
    assert [(ints * by).dtype for by in (True, 1, 1.0, 1j)] == [
        torch.int32,
        torch.int32,
        torch.float32,
        torch.complex64,
    ]


def test_conjugated_and_negated_views(device: Any) -> None:
    a = torch.tensor([[1 + 2j, 3j], [2 - 1j, 1]])
    there = a.to(device)
    assert torch.equal((there.mH @ there).cpu(), a.mH @ a)
    assert torch.equal(there.conj().imag.cpu(), a.conj().imag)
    queries = there.conj().imag.repeat(1, 1, 1, 1)
    attention = nn.functional.scaled_dot_product_attention
    view, here = there[None, None].conj().imag, a[None, None].conj().imag
    assert view.is_neg()
    torch.testing.assert_close(attention(queries, queries, view).cpu(), attention(queries.cpu(), queries.cpu(), here))
    view.copy_(torch.tensor([[3, 250], [0, 1]], dtype=torch.uint8).to(device))
    assert view.cpu().tolist() == [[[[3, 250], [0, 1]]]]
    assert there.imag.cpu().tolist() == [[-3, -250], [0, -1]]
    with pytest.raises(sky.UsageError, match="conjugated"):
        sky.run_on(device, torch.abs, there.conj())


def test_elements_that_share_memory_are_not_written_to(device: Any) -> None:
    """It is an error at once: after a later one, autograd would have recorded the change."""
    x = torch.ones(3, device=device, requires_grad=True)
    y = x * 1
    wide = y.expand(2, 3)
    for write in (
        lambda: wide.mul_(5),
        lambda: wide.copy_(torch.zeros(2, 3)),
        lambda: wide.copy_(torch.zeros(2, 3, device=device)),
        lambda: torch.sin(y.detach(), out=wide.detach()[0:1].expand(3, 3)),
    ):
        with pytest.raises(RuntimeError, match=r"more than one element|shape"):
            write()
    y.sum().backward()
    assert x.grad.tolist() == [1, 1, 1]
    assert y.detach().expand(2, 3).zero_().tolist() == [[0, 0, 0]] * 2


def test_tensors_of_two_hosts_are_refused_at_once(device: Any, other: Any, syncs: Callable[[], int]) -> None:
    here, there = torch.ones(1, 2, 3, 4, device=device), torch.ones(1, 2, 3, 4, device=other)
    lstm, linear = nn.LSTM(4, 4).to(device), nn.Linear(4, 4).to(device)
    module = sky.remote(linear)
    module(here)
    attention = nn.functional.scaled_dot_product_attention
    before = syncs()
    for call in (
        lambda: attention(here, there, there),
        lambda: lstm(there[0]),
        lambda: nn.LSTMCell(4, 4).to(device)(there[0, 0]),
        lambda: linear(there),
        lambda: module(there),
        lambda: module(there[0]),
    ):
        with pytest.raises(RuntimeError, match=rf"{device} \(\w+\) and {other} \(\w+\)"):
            call()
    assert syncs() == before
    sky.synchronize()


def test_a_generator_of_another_device(device: Any, other: Any) -> None:
    generator = torch.Generator(device=other)
    for call in (
        lambda: torch.rand(3, generator=generator, device=device),
        lambda: torch.ones(3, device=device).normal_(generator=generator),
        lambda: torch.ones(3, device=device).multinomial(1, generator=generator),
    ):
        with pytest.raises(RuntimeError, match=rf"expected a generator of {device} .* found one of {other}"):
            call()
    assert torch.rand(3, generator=generator, device=other).shape == (3,)
    with pytest.raises(RuntimeError, match="found one on cpu"):
        torch.rand(3, generator=torch.Generator(), device=device)


def test_numbers_of_this_machine_fill_masks(device: Any) -> None:
    x, mask = torch.ones(2, device=device, requires_grad=True), torch.tensor([True, False]).to(device)
    value = torch.tensor(3.0, requires_grad=True)
    filled = x.masked_fill(mask, value)
    filled.sum().backward()
    assert (filled.tolist(), x.grad.tolist(), value.grad.item()) == ([3, 1], [0, 1], 1)
    assert torch.ones(2, device=device).masked_fill_(mask, torch.tensor(4)).tolist() == [4, 1]
    index = torch.tensor([1], device=device)
    assert torch.zeros(2, device=device).index_fill(0, index, torch.tensor(3.0)).tolist() == [0, 3]
    with pytest.raises(RuntimeError, match="on cpu"):
        x.masked_fill(mask, torch.tensor([3.0]))


@pytest.mark.parametrize("kind", ["sparse_coo", "nested", "qint8"])
def test_results_of_other_layouts_cannot_stay(remote_pool: sky.Compute, device: Any, kind: str) -> None:
    def make() -> Any:
        made = torch.ones(2, 2)
        if kind == "nested":
            return torch.nested.nested_tensor([made, made])
        if kind == "qint8":
            return torch.quantize_per_tensor(made, 0.1, 0, torch.qint8)
        return [made, made.to_sparse()]

    gc.collect()  # errors of other tests hold tensors
    before = sky.memory(device)["tensors"]
    with pytest.raises(sky.DeviceError, match=f"cannot contain a .*{kind}"):
        sky.run_on(device, make)
    with pytest.raises(TypeError, match=f"cannot contain a .*{kind}"):
        remote_pool.submit(sky.function(make)(), keep=True).result(170)
    assert sky.memory(device)["tensors"] == before


def test_what_is_set_here_is_set_there(device: Any) -> None:
    def found() -> Any:
        import torch

        return torch.get_float32_matmul_precision(), torch.get_deterministic_debug_mode()

    assert sky.run_on(device, found) == ("highest", 0)
    try:
        torch.set_float32_matmul_precision("medium")
        assert sky.run_on(device, found) == ("medium", 0)
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert sky.run_on(device, found) == ("medium", 1)
        torch.use_deterministic_algorithms(True)
        order = torch.tensor([0, 0]).to(device)
        torch.zeros(2).to(device).put_(order, torch.ones(2).to(device), accumulate=False)
        with pytest.raises(sky.DeviceError, match="deterministic"):
            sky.synchronize()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
    assert sky.run_on(device, found) == ("highest", 0)


def test_the_default_dtype(device: Any) -> None:
    """That of the program holds there too, and what a function sets holds for it alone."""

    def change() -> str:
        torch.set_default_dtype(torch.float64)
        return str(torch.ones(1).dtype)

    def values() -> Iterator[str]:
        torch.set_default_dtype(torch.float16)
        while True:
            time.sleep(0.05)  # a reply for each value
            yield str(torch.ones(1).dtype)

    def dtypes() -> set[Any]:
        numbers = torch.arange(4, device=device)
        made = [torch.arange(3.0, device=device), numbers / 2, numbers * 1.5, torch.ones(1, device=device)]
        assert made[1].tolist() == [0, 0.5, 1, 1.5]
        return {tensor.dtype for tensor in made} | {sky.run_on(device, lambda: torch.ones(1)).dtype}

    assert dtypes() == {torch.float32}
    assert sky.run_on(device, change) == "torch.float64"
    found = sky.run_on(device, values)
    for _ in range(6):
        assert next(found) == "torch.float16"
        assert dtypes() == {torch.float32}
    found.close()
    torch.set_default_dtype(torch.float64)
    try:
        assert dtypes() == {torch.float64}
    finally:
        torch.set_default_dtype(torch.float32)
    assert dtypes() == {torch.float32}
