"""The memory of a device's worker: its tensors by id, their bytes, and how much is free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

from skyfab.errors import DeviceError
from skyfab.host.ask import survey
from skyfab.host.device import wire

DTYPES: Final = tuple(getattr(torch, name, None) for name in wire.DTYPES)
"""By their number; None where this torch does not have it."""
DTYPE_NUMBERS: Final = {dtype: number for number, dtype in enumerate(DTYPES)}


class Lost(DeviceError):
    """Something needs a tensor that has no value, or was not called, because of an earlier error."""


class Failure:
    """Why instructions were not executed. The client knows more of it than the host, and sends it later."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return f"because of an earlier error: {self.text}"


class Tensors(dict[int, torch.Tensor]):
    """The tensors of a device, by id. Using one that is missing raises `Lost`, with the reason."""

    def __init__(self) -> None:
        super().__init__()
        self._lost: dict[int, Failure] = {}
        """Those that were never computed, or whose changes were not executed."""

    def __missing__(self, ident: int) -> torch.Tensor:
        raise Lost(f"it needs a tensor that has no value {self._lost.get(ident, 'because of an earlier error')}")

    def lose(self, idents: Iterable[int], failure: Failure) -> None:
        """Remembers why tensors are not computed."""
        self._lost.update((ident, failure) for ident in idents if ident and ident not in self)

    def lose_memory(self, idents: Iterable[int], failure: Failure) -> None:
        """Drops these tensors, and all others that share memory with them."""
        memories = {memory_of(self[ident]) for ident in idents if ident in self}
        shared = [ident for ident, tensor in self.items() if tensor.numel() and memory_of(tensor) in memories]
        for ident in shared:
            del self[ident]
        self.lose(shared, failure)

    def view(self, ident: int, base: int, layout: tuple[Iterable[int], Iterable[int], int, int]) -> None:
        """Another view of the memory of a tensor: shape, strides, offset and dtype. It is lost if the tensor is."""
        found = self.get(base)
        if found is not None:
            self[ident] = _view(found, *layout)
        elif base in self._lost:
            self._lost[ident] = self._lost[base]

    def free(self, ident: int) -> None:
        self.pop(ident, None)
        self._lost.pop(ident, None)

    def usage(self, device: torch.device) -> dict[str, int | None]:
        """How many tensors there are, and bytes: allocated by them, free and in all."""
        found: dict[str, int | None] = {"tensors": len(self)}
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            return {**found, "allocated": torch.cuda.memory_allocated(device), "free": free, "total": total}
        allocated, system = sum(storage.nbytes() for storage in storages_of(self.values())), survey.memory()
        return {**found, "allocated": allocated, "free": system["memory_free"], "total": system["memory"]}


def memory_of(tensor: torch.Tensor) -> int:
    """A number for the memory that a tensor is in."""
    return int(tensor.untyped_storage()._cdata)


def storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The storages of tensors, each once."""
    return list({memory_of(tensor): tensor.untyped_storage() for tensor in tensors}.values())


def _view(tensor: torch.Tensor, shape: Iterable[int], strides: Iterable[int], offset: int, dtype: int) -> torch.Tensor:
    if tensor.dtype is DTYPES[dtype]:
        return torch.as_strided(tensor, shape, strides, offset)
    empty = torch.empty(0, dtype=DTYPES[dtype], device=tensor.device)
    return empty.set_(tensor.untyped_storage(), offset, shape, strides)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements in order, in memory of this process."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    here = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return memoryview(here.reshape(-1).view(torch.uint8).numpy()) if here.numel() else memoryview(b"")


# ---- memory that is moved

Moved = list[tuple[torch.UntypedStorage, torch.UntypedStorage]]
"""Storages whose bytes are in the host's memory, each with its copy there."""


def move_out(tensors: Iterable[torch.Tensor]) -> Moved:
    """Moves the memory of these tensors into that of the host, except what PyTorch cannot free: received messages.

    Storages are emptied in place: tensors, their views, and what autograd has saved of them stay valid.
    """
    moved = []
    for storage in storages_of(tensors):
        if storage.nbytes() and storage.resizable():
            copy = torch.UntypedStorage(storage.nbytes(), device="cpu")
            copy.copy_(storage, non_blocking=False)
            moved.append((storage, copy))
            storage.resize_(0)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return moved


def restore(moved: Moved) -> None:
    """Moves everything back, and empties the list. Raises OutOfMemoryError; what is left in it can be moved later."""
    while moved:
        storage, copy = moved[-1]
        storage.resize_(copy.nbytes())
        storage.copy_(copy, non_blocking=False)
        moved.pop()
