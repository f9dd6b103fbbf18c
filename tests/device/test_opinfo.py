"""PyTorch's own database of operators and sample inputs: remote devices compute what the CPU here computes."""

from __future__ import annotations

import contextlib
import itertools
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import skyfab as sky

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.lab, pytest.mark.filterwarnings("ignore")]

SAMPLES = 3
STRIDED = "not contiguous"
"""The name of a sample whose tensors are made so."""
SPREAD = 20
"""Unless all are tested, one of 20 entries is."""

NOT_SPARSE = "remote devices do not support sparse tensors"
INDICES_HERE = "PyTorch wants these indices on the CPU, as it does for CUDA"
BACKWARD = {
    "sparse.mm.reduce": NOT_SPARSE,
    "sparse.sampled_addmm": NOT_SPARSE,
    "tensor_split": INDICES_HERE,
    "to_sparse": NOT_SPARSE,
}
"""What fails, and why."""
FORWARD = {
    **BACKWARD,
    "_native_batch_norm_legit": "with out=: PyTorch's meta device does not resize it; the host refuses",
}

SHAPES_ONLY = frozenset(
    (
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    )
)
"""Entries whose results have elements that nothing was written to."""


def leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def moved(value: Any, device: Any) -> Any:
    """A copy of a value on a device. Strides, offsets and conjugations of tensors stay as they are."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return device
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            return leaf
        plain = leaf.detach()
        plain = plain.conj() if leaf.is_conj() else plain
        plain = plain._neg_view() if leaf.is_neg() else plain
        size = plain.untyped_storage().nbytes() // plain.element_size()
        copy = plain.as_strided((size,), (1,), 0).clone().to(device)
        copy = copy.as_strided(plain.shape, plain.stride(), plain.storage_offset())
        copy = copy.conj() if leaf.is_conj() else copy
        copy = copy._neg_view() if leaf.is_neg() else copy
        return copy.requires_grad_(leaf.requires_grad)

    return torch.utils._pytree.tree_map(move, value)


class Sample:
    """The input of an entry on one device."""

    def __init__(self, sample: Any, device: Any) -> None:
        self.input, self.args, self.kwargs = moved((sample.input, sample.args, sample.kwargs), device)
        if "device" in self.kwargs:
            self.kwargs["device"] = device


def function(op: Any, sample: Sample) -> Any:
    return op(sample.input, *sample.args, **sample.kwargs)


def in_place(op: Any, sample: Sample) -> Any:
    result = op.inplace_variant(sample.input, *sample.args, **sample.kwargs)
    return sample.input, result


def with_out(op: Any, sample: Sample) -> Any:
    like = leaves(function(op, sample))
    out = tuple(torch.empty(0, dtype=tensor.dtype, device=tensor.device) for tensor in like)
    op(sample.input, *sample.args, **sample.kwargs, out=out if len(out) > 1 else out[0])
    return out


def gradients(op: Any, sample: Sample, process: Callable[[Any], Any] = lambda result: result) -> Any:
    """The gradients of all inputs that require one, for gradients of the outputs that are the same each time."""
    inputs = [leaf for leaf in leaves((sample.input, sample.args, sample.kwargs)) if leaf.requires_grad]
    outputs = [leaf for leaf in leaves(process(function(op, sample))) if leaf.requires_grad]
    generator = torch.Generator().manual_seed(1)
    above = [torch.randn(t.shape, dtype=t.dtype, generator=generator).to(t.device) for t in outputs]
    return torch.autograd.grad(outputs, inputs, above, allow_unused=True) if inputs and outputs else ()


def forms(op: Any, sample: Any, backward: bool) -> list[Callable[..., Any]]:
    if backward:
        return [gradients]
    found = [function]
    if op.inplace_variant and not sample.broadcasts_input:
        found.append(in_place)
    # With out=, the CPU's own batch norms compute something else of tensors that are not contiguous.
    if op.supports_out and not ("batch_norm" in op.name and sample.name == STRIDED):
        found.append(with_out)
    return found


def samples(op: Any, dtype: Any, backward: bool) -> Iterator[Any]:
    torch.manual_seed(0)
    try:
        found = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=backward), SAMPLES))
    except Exception:  # there are none for this dtype
        return
    yield from found
    for sample in found[-1:]:
        strided = sample.noncontiguous()
        strided.name = STRIDED
        yield strided


def outcome(op: Any, device: Any, backward: bool) -> str | None:
    """Compares the device with the CPU here: "" if they agree, the difference, or None if the CPU has nothing."""
    dtype = next((dtype for dtype in (torch.float32, torch.int64) if op.supports_dtype(dtype, "cpu")), None)
    if dtype is None or (backward and not op.supports_autograd):
        return None
    compared = False
    for sample in samples(op, dtype, backward):
        for form in forms(op, sample, backward):
            options = {"process": sample.output_process_fn_grad} if backward else {}
            here, there = Sample(sample, "cpu"), Sample(sample, device)
            torch.manual_seed(0)
            try:
                expected = form(op, here, **options)
            except Exception:
                continue
            torch.manual_seed(0)
            try:
                found = form(op, there, **options)
                agree(op, (found, there.input), (expected, here.input))
            except Exception as error:
                return f"{form.__name__}: {type(error).__name__}: {' '.join(str(error).split())}"
            compared = True
    return "" if compared else None


def agree(op: Any, found: Any, expected: Any) -> None:
    theirs, mine = leaves(found), leaves(expected)
    assert len(theirs) == len(mine), "another number of results"
    for there, here in zip(theirs, mine, strict=True):
        assert (there.shape, there.dtype, there.layout) == (here.shape, here.dtype, here.layout)
        values = there.detach().cpu()
        if op.name not in SHAPES_ONLY:
            torch.testing.assert_close(values, here.detach(), rtol=1e-4, atol=1e-4, equal_nan=True)


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def failures(ops: Sequence[Any], device: Any, backward: bool) -> tuple[dict[str, str], int]:
    """What fails, and how many entries the CPU supports."""
    found, count = {}, 0
    for op in ops:
        result = outcome(op, device, backward)
        count += result is not None
        if result:
            found[name_of(op)] = result
        with contextlib.suppress(sky.DeviceError):
            torch.sky.synchronize()
    return found, count


@pytest.fixture(scope="module")
def entries() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    assert len({*map(name_of, op_db)}) == len(op_db)
    return list(op_db)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "share", [pytest.param(SPREAD, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize(("backward", "expected"), [(False, FORWARD), (True, BACKWARD)], ids=["forward", "backward"])
def test_operators(device: Any, entries: list[Any], backward: bool, expected: dict[str, str], share: int) -> None:
    chosen = [op for op in entries if zlib.crc32(name_of(op).encode()) % share == 0]
    found, count = failures(chosen, device, backward)
    assert found.keys() == expected.keys() & {*map(name_of, chosen)}, found
    assert count > 300 / share
