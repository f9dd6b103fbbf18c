"""The behaviours of tests/device on a GPU of this machine: ``python -m pytest --noconftest tests/gpu``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skyfab as sky

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU that torch can use", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "device"))
import test_behaviours  # noqa: E402
from test_behaviours import *  # noqa: E402, F403
from test_remote_functions import *  # noqa: E402, F403

test_behaviours.TOLERANCE = 5e-3  # cuDNN's recurrent layers use TensorFloat-32


@pytest.fixture(scope="module")
def remote_pool() -> Iterator[sky.Compute]:
    with sky.Compute("local", image=sky.Image(python=sys.executable), ui="none") as compute:
        yield compute


@pytest.fixture
def device(remote_pool: sky.Compute) -> Any:
    return remote_pool.device("cuda")


@pytest.fixture
def other(remote_pool: sky.Compute) -> Any:
    return remote_pool.device("cpu")


@pytest.fixture
def same_numbers() -> bool:
    return False


@pytest.fixture
def syncs(device: Any) -> Iterator[Callable[[], int]]:
    with sky.device.profile() as found:
        yield lambda: found.waits


def test_the_machines_own_gpu_still_computes_and_backward_is_an_error(device: Any) -> None:
    own = torch.ones(3, device="cuda", requires_grad=True)
    assert (own * 2).sum().item() == 6
    with pytest.raises(RuntimeError):
        (own * 2).sum().backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when it imports Inductor
def test_a_compiled_module_that_enters_autocast(device: Any) -> None:
    class Casting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            with torch.autocast(x.device.type, dtype=torch.bfloat16):
                return self.layer(x)

    model = Casting().to(device)
    x = torch.ones(2, 8, device=device)
    found = torch.compile(model)(x)
    found.float().sum().backward()
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.float().cpu(), model(x).float().cpu(), atol=0.05)
    assert model.layer.weight.grad is not None
