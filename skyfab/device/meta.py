"""Predicts the layout of results on PyTorch's meta device, whose tensors have no memory.

Wrong dtypes that kernels refuse and the meta device does not are errors here: they raise in the line that is wrong.
"""

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
        "_embedding_bag",
        "_embedding_bag_forward_only",
    )
)
"""Operators some of whose results have other shapes or dtypes on CPUs. PyTorch's meta device has those of GPUs."""
_BAGS: Final = frozenset(("_embedding_bag", "_embedding_bag_forward_only"))
_SCALARS_OF_CPU: Final = frozenset(("masked_fill", "masked_fill_", "index_fill", "index_fill_"))
"""Operators that on devices take a number in this machine's memory too, and on PyTorch's meta device do not."""

_NEED_WEIGHTS: Final = 10
"""The index of that argument of attention: without it there is no second result, other than on the meta device."""
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
        if name in _BAGS and meta_args[1].dtype is not meta_args[2].dtype:  # kernels convert both to the larger one
            meta_args[1:3] = [indices.to(torch.int64) for indices in meta_args[1:3]]
        is_bfloat16 = name in _BAGS and device == "cpu" and meta_args[0].dtype is torch.bfloat16
        if is_bfloat16:  # kernels treat it as they treat float16
            meta_args = [value.half() if getattr(value, "is_floating_point", bool)() else value for value in meta_args]
        if name.startswith("nll_loss"):  # kernels take targets of uint8 too
            meta_args = [value.long() if getattr(value, "dtype", None) is torch.uint8 else value for value in meta_args]
        if name == "_grouped_mm" and meta_args[0].dtype is not torch.bfloat16:
            result = _grouped_mm(*meta_args, **meta_kwargs)
        elif name == "nansum" and len(args) > 1 and not args[1]:  # without dimensions, kernels sum up all elements
            result = op(meta_args[0], None, *meta_args[2:], **meta_kwargs)
        else:
            result = op(*meta_args, **meta_kwargs)
        if is_bfloat16:
            result = tuple(found.bfloat16() if found.is_floating_point() else found for found in result)
    if name == "convolution" and torch.float64 not in (meta_args[0].dtype, meta_args[1].dtype):
        result = _in_format(result, *meta_args[:2])
    if name == "convolution_backward" and torch.float64 not in (meta_args[1].dtype, meta_args[2].dtype):
        result = (*(grad if grad is None else _in_format(grad, *meta_args[1:3]) for grad in result[:2]), result[2])
    if name == "max_pool3d_with_indices":
        result = tuple(_pooled(found, meta_args[0]) for found in result)
    if name == "max_pool3d_with_indices_backward":
        result = _pooled(result, meta_args[1])
    if device != "cpu" and op is torch.ops.aten.log_sigmoid_forward.default:
        result = (result[0], result[1].new_empty(0))  # what only CPUs keep for the backward
    if name == "_native_multi_head_attention" and not kwargs.get("need_weights", (*args[_NEED_WEIGHTS:], True)[0]):
        result = (result[0], None)
    return result, meta_args, meta_kwargs


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """PyTorch's meta device refuses dtypes that its kernels take."""
    shape = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim():
        shape.insert(0, a.shape[0] if a.dim() == 3 else offs.numel())
    return torch.empty(shape, dtype=out_dtype or a.dtype, device="meta")


def _pooled(result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A result of pooling in three dimensions, in the format of the input, which may be one image of a batch."""
    return _in_format(result, x) if x.dim() == 5 else _in_format(result[None], x[None])[0]


def _in_format(result: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """A result of a convolution or pooling as kernels return it; on the meta device it is always contiguous."""
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


# ---- dtypes that kernels refuse

_SAME: Final = frozenset(
    ("mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "addmv", "dot", "vdot", "linear", "convolution")
)
"""Operators whose tensors must have one dtype."""
_SAME_PAIR: Final = {"index_add": (0, 3), "index_add_": (0, 3), "binary_cross_entropy": (0, 1)}
"""The same for two of their arguments."""
_NOT_COMPLEX: Final = frozenset(
    ("clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "max", "min", "mse_loss")
)
_LOWER: Final = (torch.float16, torch.bfloat16)


def check_arguments(name: str, args: Sequence[Any]) -> None:
    """Raises RuntimeError before an operator is planned."""
    tensors = {at: value for at, value in enumerate(args) if isinstance(value, torch.Tensor)}
    dtypes = [tensor.dtype for tensor in tensors.values()]
    pair = [args[at].dtype for at in _SAME_PAIR.get(name, ())]
    if name == "native_layer_norm" and dtypes[0] not in _LOWER:  # those may have weights of float32, on CPUs
        pair = dtypes
    if len(set(dtypes if name in _SAME else pair)) > 1:
        raise RuntimeError(f"{name}: expected tensors of one dtype, but got {', '.join(map(str, pair or dtypes))}")
    if name in ("sub", "sub_", "rsub") and any(
        type(value) is bool or getattr(value, "dtype", None) is torch.bool for value in args[:2]
    ):
        raise RuntimeError("Subtraction, the `-` operator, with a bool tensor is not supported: use `^` or logical_xor")
    if name in _NOT_COMPLEX and any(dtype.is_complex for dtype in dtypes):
        raise RuntimeError(f"{name}: complex tensors are not supported")
    if name.startswith("bitwise_") and any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes):
        raise RuntimeError(f"{name}: expected integers or bool, but got {', '.join(map(str, dtypes))}")
    if name in ("nll_loss_forward", "nll_loss2d_forward") and args[1].dtype not in (torch.int64, torch.uint8):
        raise RuntimeError(f"expected target dtype to be Long or Byte, but got {args[1].dtype}")
    if name in ("masked_fill", "masked_fill_") and args[1].dtype is not torch.bool:
        raise RuntimeError(f"{name}: only supports boolean masks, but got mask with dtype {args[1].dtype}")
    if name == "multinomial" and not dtypes[0].is_floating_point:
        raise RuntimeError(f"multinomial only supports floating-point dtypes for input, got: {dtypes[0]}")


def check_cast(op: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises RuntimeError if a result does not fit into the tensor that it is written to. The arguments are on meta."""
    if not name.endswith("_") or name.endswith("__") or torch.Tag.pointwise not in op.tags:
        return
    wanted, plain = args[0].dtype, getattr(torch.Tensor, name[:-1], None)  # torch.ops.aten would import torch._dynamo
    values = [*args, *kwargs.values()]
    has_complex = any(isinstance(value, complex) or getattr(value, "dtype", wanted).is_complex for value in values)
    if plain is None or wanted.is_complex or (wanted.is_floating_point and not has_complex):
        return
    found = plain(*args, **kwargs).dtype
    if not torch.can_cast(found, wanted):
        raise RuntimeError(f"{name}: result type {found} can't be cast to the desired output type {wanted}")
