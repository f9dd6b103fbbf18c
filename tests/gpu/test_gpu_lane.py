"""Large CUDA tensors out and back, on a GPU of this machine: ``python -m pytest --noconftest tests/gpu``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
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
def doubled(value: Any, lock: Any = None) -> Any:
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


@sky.function
def failing(value: Any) -> None:
    raise ValueError(float(value.sum()))


@sky.function
def made(count: int) -> Any:
    return torch.ones(count, device="cuda")


def test_memory_of_the_gpu_is_free_after_calls(compute: sky.Compute) -> None:
    value = torch.ones(COUNT, device="cuda")
    for _ in range(20):
        doubled(value) >> compute
        with pytest.raises(ValueError, match=str(float(COUNT))):
            failing(value) >> compute
        with pytest.raises(sky.NotPicklable):
            doubled(value, Lock()) >> compute
        with pytest.raises(sky.NotPicklable):
            locked(value) >> compute
    assert allocated() >> compute < 4 * value.nbytes
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() < 4 * value.nbytes


@sky.function
def locked(value: Any) -> Any:
    return value, Lock()


@sky.function
def allocated() -> int:
    torch.cuda.ipc_collect()
    return int(torch.cuda.memory_allocated())


def test_arguments_stay_as_they_are_and_those_that_wait_are_copied(compute: sky.Compute) -> None:
    value = torch.ones(COUNT, device="cuda")
    futures = []
    for _ in range(4):
        futures.append(doubled(value) > compute)
        value += 1
    assert [float(future.result()[0]) for future in futures] == [2, 4, 6, 8]


def test_threads_at_once(compute: sky.Compute) -> None:
    def one(number: int) -> bool:
        value = torch.full((COUNT,), float(number), device="cuda")
        return all(bool((doubled(value) >> compute == 2 * number).all()) for _ in range(5))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(one, range(1, 9)))


def test_a_killed_worker_loses_only_its_call(compute: sky.Compute) -> None:
    value = torch.ones(COUNT, device="cuda")
    with pytest.raises(sky.WorkerDied):
        killed(value) >> compute
    assert float((doubled(value) >> compute)[0]) == 2


@sky.function
def killed(value: Any) -> None:
    os.kill(os.getpid(), 9)


def test_memory_that_cannot_be_shared_is_copied(compute: sky.Compute, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    value = torch.ones(COUNT, device="cuda")
    assert float((doubled(value) >> compute)[-1]) == 2


def test_workers_with_gpus_of_their_own(compute: sky.Compute) -> None:
    value = torch.ones(COUNT, device="cuda")
    assert float(compute.submit(doubled(value), gpus=1).result()[-1]) == 2
    assert float((made(COUNT) >> compute).sum()) == COUNT


def test_a_result_outlives_the_pool() -> None:
    with sky.Compute("local", image=sky.Image(python=sys.executable), ui="none") as compute:
        found = doubled(torch.ones(COUNT, device="cuda")) >> compute
    assert float(found.sum()) == 2 * COUNT
