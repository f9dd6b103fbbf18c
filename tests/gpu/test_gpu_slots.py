"""GPUs as slots on a GPU of this machine: ``python -m pytest --noconftest tests/gpu/test_gpu_slots.py``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import pytest

import skyfab as sky

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU that torch can use", allow_module_level=True)


@pytest.fixture(scope="module")
def compute() -> Iterator[sky.Compute]:
    host = sky.Host(name="here", transport="local", gpus=(0,))
    with sky.Compute([host], image=sky.Image(python=sys.executable), ui="none") as pool:
        yield pool


def what_fits(share: float, seconds: float) -> tuple[str, int, bool, bool, bool, float, float]:
    """What this process sees, and whether it can allocate a little less and a little more than its share."""
    import torch

    initialized = torch.cuda.is_initialized()
    began, total = time.time(), torch.cuda.get_device_properties(0).total_memory

    def fits(part: float) -> bool:
        try:
            torch.empty(int(total * part), dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError:
            return False
        finally:
            torch.cuda.empty_cache()
        return True

    little, much = fits(share * 0.8), fits(share * 1.1)
    time.sleep(seconds)
    visible = os.environ["CUDA_VISIBLE_DEVICES"]
    return visible, torch.cuda.device_count(), initialized, little, much, began, time.time()


def test_two_processes_with_half_a_gpu_each_keep_their_caps(compute: sky.Compute) -> None:
    one, other = compute.map(what_fits, [0.5, 0.5], [5.0, 5.0], gpus=0.5)
    for found in (one, other):
        assert found[:5] == ("0", 1, False, True, False), found
    assert one[5] < other[6], "they ran at the same time"
    assert other[5] < one[6], "they ran at the same time"


def test_a_small_share_and_a_whole_gpu(compute: sky.Compute) -> None:
    """The processes of the test above make way: nearly all of the memory is free for a call with a whole GPU."""
    assert compute.submit(sky.function(what_fits)(0.1, 0), gpus=0.1).result()[3:5] == (True, False)
    assert compute.submit(sky.function(what_fits)(0.9, 0), gpus=1).result()[:4] == ("0", 1, False, True)
    assert compute.submit(sky.function(what_fits)(0.25, 0), gpus=0.25).result()[3:5] == (True, False)


def test_a_plugin_that_loads_torch_first_does_not_lift_the_cap() -> None:
    host = sky.Host(name="here", transport="local", gpus=(0,))
    image, plugins = sky.Image(python=sys.executable), [sky.plugins.torch()]
    with sky.Compute([host], image=image, plugins=plugins, ui="none") as pool:
        assert pool.submit(sky.function(what_fits)(0.2, 0), gpus=0.2).result()[3:5] == (True, False)
