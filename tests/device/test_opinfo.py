"""PyTorch's own database of operators and sample inputs: remote devices compute what the CPU here computes."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.lab, pytest.mark.filterwarnings("ignore")]

SAMPLES = 3
SPREAD = 12
"""The default form takes one of so many entries."""

FORWARD: dict[str, str] = {}
"""What fails, and why."""

BACKWARD: dict[str, str] = {}

SHAPES_ONLY = frozenset(
    ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_", "resize_as_")
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


def forms(op: Any, backward: bool) -> list[Callable[..., Any]]:
    if backward:
        return [gradients]
    return [function, *([in_place] if op.inplace_variant else []), *([with_out] if op.supports_out else [])]


def samples(op: Any, dtype: Any, backward: bool) -> Iterator[Any]:
    torch.manual_seed(0)
    try:
        found = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=backward), SAMPLES))
    except Exception:  # there are none for this dtype
        return
    for sample in found:
        yield sample
    for sample in found[-1:]:
        yield sample.noncontiguous()


def outcome(op: Any, device: Any, backward: bool) -> str | None:
    """Compares the device with the CPU here: "" if they agree, the difference, or None if the CPU has nothing."""
    dtype = next((dtype for dtype in (torch.float32, torch.int64) if op.supports_dtype(dtype, "cpu")), None)
    if dtype is None or (backward and not op.supports_autograd):
        return None
    compared = False
    for sample in samples(op, dtype, backward):
        for form in forms(op, backward):
            if form is in_place and sample.broadcasts_input:
                continue
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
                agree(op, (found, there.input), (expected, here.input), device)
            except Exception as error:
                return f"{form.__name__}: {type(error).__name__}: {' '.join(str(error).split())}"
            compared = True
    return "" if compared else None


def agree(op: Any, found: Any, expected: Any, device: Any) -> None:
    theirs, mine = leaves(found), leaves(expected)
    assert len(theirs) == len(mine), "another number of results"
    for there, here in zip(theirs, mine, strict=True):
        assert there.shape == here.shape and there.dtype == here.dtype, f"{there.shape} {there.dtype}, not {here.shape} {here.dtype}"
        values = there.detach().cpu()
        if here.layout is torch.strided and op.name not in SHAPES_ONLY:
            torch.testing.assert_close(values, here.detach(), rtol=1e-3, atol=1e-3, equal_nan=True)


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
