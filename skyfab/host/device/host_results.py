"""Results that stay on a host: which tensors are kept, and how they are described to the client.

Tensors of a result that share memory are kept as one tensor, their base, of which they are views. So they share memory
for the program too. Those in the memory of an argument are views of that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch

from skyfab.host.device.memory import DTYPE_NUMBERS, memory_of

_NOTHING: Final = MappingProxyType[int, torch.Tensor]({})
View = tuple[tuple[int, ...], tuple[int, ...], int, int]
"""Shape, strides, offset and number of the dtype: a view of a base. The offset is in elements of the view."""


def describe_result(
    value: Any, device: torch.device, given: Mapping[int, torch.Tensor] = _NOTHING
) -> tuple[list[torch.Tensor], Any]:
    """The tensors that are kept of a result, and the document that describes it. Raises TypeError.

    `given` are the arguments, as `share` has them.
    """
    found: list[torch.Tensor] = []
    layouts: list[list[Any]] = []
    """What is replied for each of them."""

    def document(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            found.append(plain(value))
            layouts.append([])
            return {"tensor": layouts[-1]}
        if value is None or isinstance(value, bool | int | float | str):
            return {"plain": value}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if isinstance(value, dict):
            return {"dict": [[document(key), document(item)] for key, item in value.items()]}
        if isinstance(value, tuple | list):
            return {type(value).__name__ if type(value) in (list, tuple) else "tuple": [*map(document, value)]}
        raise TypeError(f"a result on a device cannot contain a {type(value).__qualname__}")

    made = document(value)
    bases, locations = share(found, device, given)
    for about, (number, view) in zip(layouts, locations, strict=True):
        base = given[~number] if number < 0 else bases[number]
        about += [number, [*base.shape], [*base.stride()], DTYPE_NUMBERS[base.dtype], view]
    return bases, made


def share(
    tensors: Sequence[torch.Tensor], device: torch.device, given: Mapping[int, torch.Tensor]
) -> tuple[list[torch.Tensor], list[tuple[int, View | None]]]:
    """One base for each memory that the tensors are in; and for each tensor the base's index, and which view it is.

    A base is a tensor that has all others of its memory in itself; if there is none, the whole memory. Bases of another
    device are moved. A tensor that is part of a `given` one is a view of that: the index is then ``~key``.
    """
    groups: dict[int, list[torch.Tensor]] = {}
    memories = [memory_of(tensor) if tensor.numel() else -1 - at for at, tensor in enumerate(tensors)]
    owners = _owners(tensors, memories, given)
    for memory, tensor in zip(memories, tensors, strict=True):
        if memory not in owners:
            groups.setdefault(memory, []).append(tensor)
    bases = {memory: _base(members, device) for memory, members in groups.items()}
    numbers = {memory: number for number, memory in enumerate(groups)}
    locations: list[tuple[int, View | None]] = []
    used: set[int] = set()
    for memory, tensor in zip(memories, tensors, strict=True):
        if memory not in owners and tensor is bases[memory] and memory not in used:
            used.add(memory)
            locations.append((numbers[memory], None))
        else:
            view = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), DTYPE_NUMBERS[tensor.dtype])
            locations.append((~owners[memory] if memory in owners else numbers[memory], view))
    return [base if hasattr(base, "graph") else base.to(device) for base in bases.values()], locations


def _owners(
    tensors: Sequence[torch.Tensor], memories: Sequence[int], given: Mapping[int, torch.Tensor]
) -> dict[int, int]:
    """The key of a `given` tensor for each memory in which all of the tensors are parts of it."""
    ends: dict[int, int] = {}
    for memory, tensor in zip(memories, tensors, strict=True):
        ends[memory] = max(_end(tensor), ends.get(memory, 0))
    return {
        memory: key
        for key, tensor in given.items()
        if (memory := memory_of(tensor)) in ends and _end(tensor) >= ends[memory]
    }


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; 0 if that is not counted."""
    return 0 if tensor.is_inference() else tensor._version


def _base(members: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    if len(members) > 1 and members[0].device != device:
        return _whole(members[0], torch.uint8)  # moving it changes no strides
    ends = [_end(tensor) for tensor in members]
    for tensor, end in zip(members, ends, strict=True):
        if end == max(ends) and (not tensor.storage_offset() or not tensor.numel()):
            return tensor
    dtypes = {tensor.dtype for tensor in members}
    return _whole(members[0], dtypes.pop() if len(dtypes) == 1 else torch.uint8)


def _end(tensor: torch.Tensor) -> int:
    """The offset of its end in its memory, in bytes."""
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + extent + 1) * tensor.itemsize if tensor.numel() else 0


def _whole(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """All of the memory that a tensor is in."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(
        storage, 0, (storage.nbytes() // dtype.itemsize,), (1,)
    )


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its gradient, as its elements are in memory. Raises TypeError if they are not."""
    if hasattr(tensor, "graph"):
        return tensor
    layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    if layout != "strided" or tensor.dtype not in DTYPE_NUMBERS:
        kind = f"{layout} tensor" if layout != "strided" else f"tensor of {tensor.dtype}"
        raise TypeError(f"a result on a device cannot contain a {kind}: return a dense one: .to_dense()")
    tensor = tensor.detach()
    return tensor.clone(memory_format=torch.contiguous_format) if is_lazy(tensor) else tensor


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether its elements are not what is in its memory."""
    return bool(tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())
