"""PyTorch's own database of operators on a GPU of this machine: ``python -m pytest --noconftest tests/gpu``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyfab as sky

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU that torch can use", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "device"))
import test_opinfo  # noqa: E402

OTHER_SHAPES = "some results have other shapes on GPUs"
NO_KERNEL = "PyTorch has no kernel for GPUs"
FORWARD = {
    **test_opinfo.FORWARD,
    "_native_batch_norm_legit": OTHER_SHAPES,
    "histogram": NO_KERNEL,
    "histogramdd": NO_KERNEL,
    "narrow_copy": NO_KERNEL,
    "native_batch_norm": OTHER_SHAPES,
}
RANDOM = (
    *(
        "rand",
        "normal",
        "dropout",
        "bernoulli",
        "multinomial",
        "exponential",
        "geometric",
        "cauchy",
        "uniform",
        "rrelu",
    ),
    *("poisson", "fractional_max_pool", "scaled_dot_product_attention", "multi_head_attention", "empty", "resize"),
)
"""Other numbers than on a CPU, or none."""
AMBIGUOUS = ("svd", "eig", "qr", "lu", "pca_lowrank", "householder", "cholesky_ex", "ldl", "lstsq", "geqrf")
"""Factors that are not unique."""


def agree(op: Any, found: Any, expected: Any) -> None:
    theirs, mine = test_opinfo.leaves(found), test_opinfo.leaves(expected)
    for there, here in zip(theirs, mine, strict=True):
        assert (there.shape, there.dtype) == (here.shape, here.dtype)
        if not any(part in op.name for part in (*RANDOM, *AMBIGUOUS)):
            torch.testing.assert_close(there.detach().cpu(), here.detach(), rtol=3e-2, atol=3e-2, equal_nan=True)


@pytest.fixture(scope="module")
def device() -> Iterator[Any]:
    with sky.Compute("local", image=sky.Image(python=sys.executable), ui="none") as compute:
        yield compute.device("cuda")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("backward", "expected"), [(False, FORWARD), (True, test_opinfo.BACKWARD)])
def test_all_operators(device: Any, backward: bool, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    monkeypatch.setattr(test_opinfo, "agree", agree)
    found, count = test_opinfo.failures(op_db, device, backward)
    print(f"{count - len(found)} of {count} pass")
    assert not {name: why for name, why in found.items() if name not in expected}
    assert not expected.keys() - found.keys()
