"""Large CUDA tensors out and back, on a GPU of this machine: ``python -m pytest --noconftest tests/gpu``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

import skyfab as sky

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU that torch can use", allow_module_level=True)

COUNT = 40_000_000


@pytest.fixture(scope="module")
def compute() -> Iterator[sky.Compute]:
    with sky.Compute("local", image=sky.Image(python=sys.executable), ui="none") as compute:
        yield compute


@sky.function
def doubled(value: Any) -> Any:
    assert value.is_cuda
    value *= 2  # its own copy
    return value


@sky.function
def tied(first: Any, second: Any) -> tuple[bool, Any]:
    first += 1
    return bool((second == first[: len(second)]).all()), (first, second)


def test_content_and_device_are_kept(compute: sky.Compute) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        value = torch.arange(COUNT, device="cuda").to(dtype)
        found = doubled(value) >> compute
        assert found.is_cuda
        assert found.dtype == dtype
        assert torch.equal(found, value * 2)


def test_a_call_has_its_own_copy(compute: sky.Compute) -> None:
    value = torch.ones(COUNT, device="cuda")
    for _ in range(3):
        assert float((doubled(value) >> compute).sum()) == 2 * COUNT
    assert float(value.sum()) == COUNT


def test_views_share_memory_there_and_here(compute: sky.Compute) -> None:
    value = torch.zeros(COUNT, device="cuda")
    shared, (first, second) = tied(value, value[:1000]) >> compute
    assert shared
    first += 1
    assert float(second[0]) == 2
    assert float(value[0]) == 0


def test_a_tensor_that_is_computed_just_before_the_call(compute: sky.Compute) -> None:
    value = torch.randn(6000, 6000, device="cuda")
    product = value @ value  # not complete when the call is made
    found = doubled(product) >> compute
    assert torch.equal(found, product * 2)


def test_a_result_outlives_the_pool() -> None:
    with sky.Compute("local", image=sky.Image(python=sys.executable), ui="none") as compute:
        found = doubled(torch.ones(COUNT, device="cuda")) >> compute
    assert float(found.sum()) == 2 * COUNT
