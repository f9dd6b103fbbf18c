"""Dtypes that kernels refuse and PyTorch's meta device does not: wrong ones raise in the line that is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

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
