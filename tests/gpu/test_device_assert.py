"""A real device-side assert, on a machine with a GPU: `python tests/gpu/test_device_assert.py`, or by pytest."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable

import skyfab as sky


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


def error_of(run: Callable[[], object]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_a_process_with_a_poisoned_cuda_is_replaced() -> None:
    skip_without_a_gpu()
    lines: list[str] = []
    with sky.Compute("local", ranks=1, image=sky.Image(python=sys.executable), ui="none") as compute:
        compute.events.subscribe(lambda event: lines.append(str(event)))
        first, three = sky.function(total)() >> compute
        assert three == 3.0
        assert "out of memory" in error_of(lambda: sky.function(too_much)() >> compute)
        assert sky.function(total)() >> compute == (first, 3.0), "running out of memory does not replace the process"
        assert "device-side assert" in error_of(lambda: sky.function(out_of_bounds)() >> compute)
        second, three = sky.function(total)() >> compute
        assert (second != first, three) == (True, 3.0)
        assert "device-side assert" in error_of(lambda: sky.function(out_of_bounds)() @ compute)
        assert [three for _, three in sky.function(total)() @ compute] == [3.0]
    assert sum("CUDA no longer works in this process" in line for line in lines) == 2, lines


def skip_without_a_gpu() -> None:
    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return
    import pytest

    pytest.skip("needs a GPU that torch can use")


if __name__ == "__main__":
    test_a_process_with_a_poisoned_cuda_is_replaced()
    print("a poisoned process is replaced")
