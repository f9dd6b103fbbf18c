"""Tensors that remote devices do not support: sparse, nested and quantized ones. Making one is an error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, NoReturn

import torch
from torch.nested._internal.nested_tensor import NestedTensor

from skyfab.device.tensors import TYPE

_INSTEAD: Final = {
    "sparse": "make it dense (.to_dense()), or keep it on this machine",
    "nested": "pad it (torch.nested.to_padded_tensor), or keep a list of tensors",
    "quantized": "make it float (.dequantize()), or keep it on this machine",
    "mkldnn": "make it dense (.to_dense()), or keep it on this machine",
}
_KEYS: Final = {
    "SparsePrivateUse1": "sparse",
    "SparseCsrPrivateUse1": "sparse",
    "NestedTensorPrivateUse1": "nested",
    "QuantizedPrivateUse1": "quantized",
}
"""PyTorch's dispatch keys of such tensors."""
_NAMES: Final = {
    "_sparse": "sparse",
    "_to_sparse": "sparse",
    "sparse_": "sparse",
    "_nested": "nested",
    "q_": "quantized",
    "quantize": "quantized",
    "_mkldnn": "mkldnn",
    "mkldnn": "mkldnn",
    "to_mkldnn": "mkldnn",
}
"""Beginnings of the names of operators that make such tensors of others."""


def kind_of(name: str) -> str | None:
    """The kind of tensors that an operator is for, if they cannot be on a remote device."""
    return next((kind for beginning, kind in _NAMES.items() if name.startswith(beginning)), None)


def refuse(what: str, kind: str) -> NoReturn:
    """Raises NotImplementedError."""
    raise NotImplementedError(f"{what}: a {TYPE} device does not support {kind} tensors: {_INSTEAD[kind]}")


def refuse_layout(what: str, layout: torch.layout | None) -> None:
    """Raises NotImplementedError for a layout that is not dense."""
    if layout is not None and layout is not torch.strided:
        name = str(layout).removeprefix("torch.")
        refuse(f"{what} with layout={layout}", {"jagged": "nested", "_mkldnn": "mkldnn"}.get(name, "sparse"))


def refusing(name: str, kind: str) -> Callable[..., Any]:
    """A kernel that raises NotImplementedError."""

    def kernel(*args: Any, **kwargs: Any) -> NoReturn:
        refuse(name, kind)

    return kernel


def register() -> list[torch.library.Library]:
    """Registers what happens with such tensors, where operators for dense ones are not asked."""
    rest = torch.library.Library("_", "IMPL")
    for key, kind in _KEYS.items():
        rest.fallback(_fallback(kind), key)
    library = torch.library.Library("aten", "IMPL")
    for key, kind in _KEYS.items():
        library.impl("_to_copy", refusing("to", kind), key)  # PyTorch's own one for all keys comes before a fallback
    library.impl("zeros", refusing("zeros", "sparse"), "SparseCsrPrivateUse1")
    for name in ("compressed", "csr", "csc", "bsr", "bsc"):
        _check_results(torch, f"sparse_{name}_tensor", "sparse")
    for name in ("nested_tensor", "as_nested_tensor"):
        _check_results(torch.nested, name, "nested")
    jagged: Any = NestedTensor
    jagged.__new__ = staticmethod(_checking_values(jagged.__new__))
    return [rest, library]


def _check_results(module: Any, name: str, kind: str) -> None:
    """Refuses what a function returns, where PyTorch calls no operator that could."""
    original = getattr(module, name)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if result.device.type == TYPE:
            refuse(name, kind)
        return result

    setattr(module, name, function)


def _checking_values(original: Any) -> Callable[..., Any]:
    """Refuses nested tensors that PyTorch makes in Python, of dense ones."""

    @functools.wraps(original)
    def new(cls: Any, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if values.device.type == TYPE:
            refuse("a nested tensor", "nested")
        return original(cls, values, *args, **kwargs)

    return new


def _fallback(kind: str) -> Callable[..., Any]:
    def kernel(op: Any, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(op._schema.name.removeprefix("aten::"), kind)

    return kernel
