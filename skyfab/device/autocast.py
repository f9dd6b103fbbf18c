"""Automatic mixed precision on remote devices: which operators run in the lower precision, and which in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from skyfab.device import composite_ops
from skyfab.device.tensors import TYPE, is_plain, is_remote
from skyfab.host.device import composite_host

_LOWER: Final = frozenset(
    (
        "matmul",
        "mm",
        "mv",
        "bmm",
        "baddbmm",
        "addmm",
        "addmv",
        "addr",
        "addbmm",
        "linear",
        "scaled_dot_product_attention",
        "einsum",
        "prelu",
        "chain_matmul",
        "linalg_multi_dot",
        "linalg_vecdot",
        "lstm_cell",
        "gru_cell",
        "rnn_tanh_cell",
        "rnn_relu_cell",
    )
)
"""They run in the lower precision, and so do all convolutions."""
_PROMOTED: Final = frozenset(
    ("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot")
) | {"scatter_add", "binary_cross_entropy"}
"""They run in the precision of their arguments. All others that PyTorch casts for CUDA run in float32."""


_KEYS: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)


def register() -> list[torch.library.Library]:
    """Registers the casts. What has none runs in the precision of its arguments."""
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    library = torch.library.Library("aten", "IMPL")
    for full in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
        name = full.removeprefix("aten::")
        if name != full and name not in _PROMOTED:
            is_lower = name in _LOWER or name.lstrip("_").startswith("conv")
            kernel = _casting(composite_host.operator(name), lower=is_lower)
            library.impl(name, _casting_linear(kernel) if name == "linear" else kernel, "AutocastPrivateUse1")
    return [rest, library]


def _casting(op: Any, *, lower: bool) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(TYPE) if lower else torch.float32
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            return op(*(_cast(v, dtype) for v in args), **{name: _cast(v, dtype) for name, v in kwargs.items()})

    return kernel


def _casting_linear(rest: Callable[..., Any]) -> Callable[..., Any]:
    """A linear layer as one instruction; while torch.compile is tracing, `rest` is used."""

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        given = [tensor for tensor in (x, weight, bias) if tensor is not None]
        if not all(map(is_plain, given)) or weight.dim() != 2:
            return rest(x, weight, bias)
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            if all(is_remote(t) and t.dtype in (torch.float32, torch.float16, torch.bfloat16) for t in given):
                return composite_ops.CastLinear.apply(x, weight, bias, torch.get_autocast_dtype(TYPE))
            return torch.ops.aten.linear.default(*given)

    return linear


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    if is_remote(value) and value.is_floating_point() and value.dtype not in (dtype, torch.float64):
        return value.to(dtype)
    return value
