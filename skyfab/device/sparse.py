"""Sparse tensors, as embeddings have them as gradients: PyTorch's own object here, of two dense remote tensors.

What only concerns the object happens here. Other operators run on the host, with sparse tensors that it makes of the
same indices and values; the program waits for their results, since only the host can tell how many values there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from skyfab.device import composite_ops, manual_kernels
from skyfab.device.tensors import is_remote
from skyfab.host.device import composite_host

_KEY: Final = "SparsePrivateUse1"
_HERE: Final = frozenset(
    (
        "_sparse_coo_tensor_with_dims",
        "_sparse_coo_tensor_with_dims_and_tensors",
        "_coalesced_",
        "_dimI",
        "_dimV",
        "_indices",
        "_nnz",
        "_values",
        "clone",
        "copy_",
        "copy_sparse_to_sparse_",
        "dense_dim",
        "empty.memory_format",
        "indices",
        "is_coalesced",
        "sparse_dim",
        "sparse_resize_",
        "sparse_resize_and_clear_",
        "values",
        "zero_",
    )
)
"""Operators whose kernel for the CPU uses indices and values by operators only, which are then those of the device."""


def register(library: torch.library.Library) -> None:
    """Registers the operators that PyTorch has for sparse tensors of the CPU."""
    for full in torch._C._dispatch_get_registrations_for_dispatch_key("SparseCPU"):
        name = full.removeprefix("aten::")
        if name != full:
            library.impl(name, _kernel(name), _KEY)


def _kernel(name: str) -> Callable[..., Any]:
    op = composite_host.operator(name)
    if name in _HERE:
        return _here(manual_kernels.like_cpu(op, torch._C.DispatchKey.SparseCPU))
    if name == "add_.Tensor":
        return lambda *args, **kwargs: _add(op, *args, **kwargs)
    return lambda *args, **kwargs: _on_host(op, *args, **kwargs)


def _here(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Empty tensors that the kernel makes without naming a device are on that of its arguments."""

    def call(*args: Any, **kwargs: Any) -> Any:
        unnamed = manual_kernels.unnamed
        devices = (value.device for value in args if is_remote(value))
        device = next(devices, kwargs.get("device"))
        before, unnamed.index = unnamed.index, (device.index if device else None) or 0
        try:
            return kernel(*args, **kwargs)
        finally:
            unnamed.index = before

    return call


def _add(op: Any, self: torch.Tensor, other: torch.Tensor, *, alpha: Any = 1) -> torch.Tensor:
    """A step of an optimizer, without a wait."""
    if self.is_sparse or not other.is_sparse or other.sparse_dim() != 1 or self.shape != other.shape:
        return _on_host(op, self, other, alpha=alpha)
    return self.index_add_(0, other._indices()[0], other._values().to(self.dtype), alpha=alpha)


def _on_host(op: Any, *args: Any, **kwargs: Any) -> Any:
    found: list[torch.Tensor] = []
    wanted = kwargs.pop("device", None)
    spec = (op.name(), composite_host.template((args, kwargs), found))
    device = next(tensor.device for tensor in found if is_remote(tensor))
    if wanted not in (None, device):
        raise NotImplementedError(f"{op.name()} of a sparse tensor on {device} has no result on {wanted}")
    result = composite_ops.call_first("sparse", [found, spec], device)
    if isinstance(result, dict):
        result = torch.sparse_coo_tensor(**result, check_invariants=False)
    if op._schema.returns[0].alias_info is None:
        return result
    target = kwargs.get("out", args[0])
    return target.copy_(result) if target.is_sparse else target
