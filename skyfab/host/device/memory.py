"""The memory of a device's worker: its tensors by id, their bytes, and how much is free."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch

from skyfab.errors import DeviceError
from skyfab.host.device import wire

DTYPES: Final = tuple(getattr(torch, name, None) for name in wire.DTYPES)
"""By their number; None where this torch has no such one."""


class Lost(DeviceError):
    """Something needs a tensor that was never computed, or was not executed, because of an earlier error."""


class Failure:
    """Why instructions were not executed. The client knows more of it than the host, and tells it later."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return f"because of an earlier error: {self.text}"


class Tensors(dict[int, torch.Tensor]):
    """The tensors of a device, by id. One that is not here cannot be used: the error says why."""

    def __init__(self) -> None:
        super().__init__()
        self._lost: dict[int, Failure] = {}
        """Those that were never computed."""
        self._withheld: dict[int, tuple[torch.Tensor, set[int], Failure]] = {}
        """Those whose changes were not executed, with the numbers of the threads that do not know it yet."""

    def __missing__(self, ident: int) -> torch.Tensor:
        if ident in self._withheld:
            raise Lost(f"a change of a tensor that it needs was not executed, {self._withheld[ident][2]}")
        why = self._lost.get(ident, "because of an earlier error")
        raise Lost(f"a tensor that it needs was never computed, {why}")

    def lose(self, idents: Iterable[int], failure: Failure) -> None:
        """Remembers why tensors are not computed."""
        self._lost.update((ident, failure) for ident in idents if ident and ident not in self)

    def withhold(self, idents: Iterable[int], thread: int, failure: Failure) -> None:
        """No thread can use these tensors, nor others that share memory with them, before a thread is told."""
        known = {ident: tensor for ident, (tensor, *_) in self._withheld.items()} | self
        memories = {_memory(known[ident]) for ident in idents if ident in known}
        for tensor, threads, _ in self._withheld.values():
            if _memory(tensor) in memories:
                threads.add(thread)
        for ident in [ident for ident, tensor in self.items() if tensor.numel() and _memory(tensor) in memories]:
            self._withheld[ident] = (self.pop(ident), {thread}, failure)

    def release(self, thread: int) -> None:
        """The thread knows that its changes were not executed."""
        for ident, (tensor, threads, _) in list(self._withheld.items()):
            threads.discard(thread)
            if not threads:
                self[ident] = tensor
                del self._withheld[ident]

    def view(self, ident: int, base: int, layout: tuple[Iterable[int], Iterable[int], int, int]) -> None:
        """Another view of the memory of a tensor: shape, strides, offset and dtype. It is lost if the tensor is."""
        found = self.get(base)
        if found is not None:
            self[ident] = _view(found, *layout)
        elif base in self._withheld:
            tensor, threads, failure = self._withheld[base]
            self._withheld[ident] = (_view(tensor, *layout), set(threads), failure)
        elif base in self._lost:
            self._lost[ident] = self._lost[base]

    def free(self, ident: int) -> None:
        self.pop(ident, None)
        self._lost.pop(ident, None)
        self._withheld.pop(ident, None)

    def usage(self, device: torch.device) -> dict[str, int]:
        """How many tensors there are, and bytes: allocated by them, free and in all."""
        found = {"tensors": len(self) + len(self._withheld)}
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            return {**found, "allocated": torch.cuda.memory_allocated(device), "free": free, "total": total}
        tensors = [*self.values(), *(tensor for tensor, *_ in self._withheld.values())]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return {**found, "allocated": sum(storages.values()), **_system()}


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _view(tensor: torch.Tensor, shape: Iterable[int], strides: Iterable[int], offset: int, dtype: int) -> torch.Tensor:
    if tensor.dtype is DTYPES[dtype]:
        return torch.as_strided(tensor, shape, strides, offset)
    empty = torch.empty(0, dtype=DTYPES[dtype], device=tensor.device)
    return empty.set_(tensor.untyped_storage(), offset, shape, strides)


def _system() -> dict[str, int]:
    found = {}
    with contextlib.suppress(OSError):  # not Linux
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                found["total" if name == "MemTotal" else "free"] = int(rest.split()[0]) * 1024
    return found


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements in order, in memory of this process."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    here = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return memoryview(here.reshape(-1).view(torch.uint8).numpy()) if here.numel() else memoryview(b"")
