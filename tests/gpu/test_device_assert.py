"""A real device-side assert: on a machine with a GPU, `python -m pytest tests/gpu`."""

from __future__ import annotations

import os
import sys

import pytest

import skyfab as sky

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU that torch can use", allow_module_level=True)


def out_of_bounds() -> float:
    """Indexes past the end: the device asserts, and CUDA is unusable in this process from then on."""
    import torch

    table = torch.zeros(4, device="cuda")
    return float(table[torch.tensor([9], device="cuda")].sum().item())


def total() -> tuple[int, float]:
    import torch

    return os.getpid(), float(torch.ones(3, device="cuda").sum().item())


def too_much() -> None:
    import torch

    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


def test_a_process_with_a_poisoned_cuda_is_replaced() -> None:
    lines: list[str] = []
    with sky.Compute("local", ranks=1, image=sky.Image(python=sys.executable), ui="none") as compute:
        compute.events.subscribe(lambda event: lines.append(str(event)))
        first, three = sky.function(total)() >> compute
        assert three == 3.0
        with pytest.raises(RuntimeError, match="out of memory"):
            sky.function(too_much)() >> compute
        assert sky.function(total)() >> compute == (first, 3.0)
        with pytest.raises(RuntimeError, match="device-side assert"):
            sky.function(out_of_bounds)() >> compute
        second, three = sky.function(total)() >> compute
        assert (second != first, three) == (True, 3.0)
        with pytest.raises(sky.BroadcastError, match="failed on 1 of 1"):
            sky.function(out_of_bounds)() @ compute
        assert [three for _, three in sky.function(total)() @ compute] == [3.0]
    assert sum("CUDA no longer works in this process" in line for line in lines) == 2
