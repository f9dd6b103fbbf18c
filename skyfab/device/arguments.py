"""Arguments of operators that cannot be sent unchanged: tensors of other devices, lazy views, generators."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from skyfab.device import tensors
from skyfab.device.tensors import TYPE, is_remote
from skyfab.host.device import wire


def common_device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The index of the device of all tensors and generators. Raises RuntimeError if there are several."""
    found: set[int] = set()
    wanted: set[int] = set()
    generators: set[int] = set()
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, list | tuple) else (value,):
            if is_remote(item):
                found.add(item.device.index or 0)
            elif isinstance(item, torch.device) and item.type == TYPE:
                wanted.add(item.index or 0)
            elif isinstance(item, torch.Generator):
                generators.add(_remote(item)[1])
    if len(found) > 1:
        raise RuntimeError(
            f"expected all tensors to be on one device, found {_names(found)}: move one with .to(device)"
        )
    index = next(iter(found or wanted or {0}))
    if generators - {index}:
        raise RuntimeError(f"expected a generator of {_names({index})}, found one of {_names(generators - {index})}")
    return index


def _names(indices: Collection[int]) -> str:
    return " and ".join(f"{TYPE}:{index} ({tensors.streams[index].link.name})" for index in sorted(indices))


def resolve(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg()


def refuse_lazy(tensor: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError(f"a {TYPE} device does not support writing into a conjugated or negated view: clone it")


def is_recorded(args: Iterable[Any]) -> bool:
    """Whether autograd records an operator with these arguments."""
    return torch.is_grad_enabled() and any(
        is_recorded(arg) if type(arg) is list else isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args
    )


def refuse_overlap(tensor: torch.Tensor) -> None:
    """Raises RuntimeError if elements of a tensor that is written to share memory, as in an expanded one.

    The host would refuse it too, but later, when autograd has recorded the change.
    """
    if torch._debug_has_internal_overlap(tensor) == 1:
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )


def move_indices(tensor: torch.Tensor, indices: Any) -> Any:
    """Indices may be in this process's memory, as they may be for CUDA: they are uploaded."""
    return [index if index is None or is_remote(index) else index.to(tensor.device) for index in indices]


remote_generators: Final[dict[int, tuple[int, int]]] = {}
"""The ids of generators and the indices of their devices, by the address of PyTorch's own object."""


def _remote(generator: torch.Generator) -> tuple[int, int]:
    found = remote_generators.get(generator._cdata)  # PyTorch passes another Python object for the same generator
    if found is None:
        raise RuntimeError(
            f"expected a generator on a {TYPE} device, found one on {generator.device}: "
            "make one with torch.Generator(device=…)"
        )
    return found


def generator_operand(generator: torch.Generator, instruction: list[Any]) -> tuple[str, int]:
    """Adds the id of a generator to an instruction. Returns what a plan depends on."""
    ident, index = _remote(generator)
    instruction.append(ident)
    return wire.GENERATOR_ID, index
