"""Predicts the layout of results on PyTorch's meta device, whose tensors have no memory."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from skyfab.device.tensors import TYPE

_SHAPED_BY_DEVICE: Final = frozenset(
    (
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_no_training",
        "_batch_norm_no_update",
        "_batch_norm_with_update",
        "native_layer_norm",
    )
)
"""Operators some of whose results have other shapes or dtypes on CPUs. PyTorch's meta device has those of GPUs."""
UNPREDICTABLE: Final = frozenset(
    (
        "_embedding_bag",
        "_embedding_bag_forward_only",
        "_grouped_mm",
        "_native_multi_head_attention",
        "max_pool3d_with_indices",
        "max_pool3d_with_indices_backward",
        "nansum",
    )
)
"""Operators whose results kernels make otherwise than the meta device: the host is asked about each kind of call."""
_SCALARS_OF_CPU: Final = frozenset(("masked_fill", "masked_fill_", "index_fill", "index_fill_"))
"""Operators that on devices take a number in this machine's memory too, and on PyTorch's meta device do not."""
_CHANNELS_LAST: Final = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By dimensions."""


def predict(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: str
) -> tuple[Any, list[Any], dict[str, Any]]:
    """The results of an operator on a device of a host, and the arguments after it: some may have been resized.

    Raises NotImplementedError if PyTorch cannot tell.
    """
    where, mode = "meta", contextlib.nullcontext()
    name = op._schema.name.removeprefix("aten::")
    if name in _SCALARS_OF_CPU:
        args = [value.to(where) if isinstance(value, torch.Tensor) and value.is_cpu else value for value in args]
    if device == "cpu" and name in _SHAPED_BY_DEVICE:
        from torch._subclasses.fake_tensor import FakeTensorMode

        where, mode = "cpu", FakeTensorMode()  # slower than the meta device, and more exact
    with mode:
        meta_args = [to_meta(value, where) for value in args]
        meta_kwargs = {name: to_meta(value, where) for name, value in kwargs.items()}
        if name.startswith("nll_loss"):  # kernels take targets of uint8 too
            meta_args = [value.long() if getattr(value, "dtype", None) is torch.uint8 else value for value in meta_args]
        result = op(*meta_args, **meta_kwargs)
    if name == "convolution" and torch.float64 not in (meta_args[0].dtype, meta_args[1].dtype):
        result = _in_format(result, *meta_args[:2])
    if name == "convolution_backward" and torch.float64 not in (meta_args[1].dtype, meta_args[2].dtype):
        result = (*(grad if grad is None else _in_format(grad, *meta_args[1:3]) for grad in result[:2]), result[2])
    if device != "cpu" and op is torch.ops.aten.log_sigmoid_forward.default:
        result = (result[0], result[1].new_empty(0))  # what only CPUs keep for the backward
    return result, meta_args, meta_kwargs


def _in_format(result: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """A result of a convolution as kernels return it; on the meta device it is always contiguous."""
    found = _CHANNELS_LAST.get(result.dim())
    if found is None:
        return result
    is_last = any(t.is_contiguous(memory_format=found) and not t.is_contiguous() for t in inputs)
    return result.to(memory_format=found) if is_last else result


def to_meta(value: Any, device: str = "meta") -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type != TYPE:
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    if isinstance(value, list | tuple):
        return type(value)(to_meta(item, device) for item in value)
    if isinstance(value, torch.device):
        return torch.device(device)
    return None if isinstance(value, torch.Generator) else value
