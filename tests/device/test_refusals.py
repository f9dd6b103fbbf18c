"""What a remote device cannot do raises, and nothing that follows is wrong."""

from __future__ import annotations

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


def test_a_new_tensor_is_on_the_device_of_the_old_one(device: Any, other: Any) -> None:
    for where in (device, other):
        assert torch.ones(2, device=where).new_tensor([1.0]).device == where
        assert torch.ones(2, device=where).new(3).device == where


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


def test_copies_that_need_not_block(device: Any) -> None:
    assert torch.ones(2, device=device).to("cpu", non_blocking=True).tolist() == [1, 1]
    assert torch.ones(2, device=device).to(torch.float16).dtype is torch.float16
