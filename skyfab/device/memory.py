"""The memory of a device's worker: its tensors by id, their bytes, and how much is free."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

import torch

from skyfab.device import wire
from skyfab.errors import DeviceError

DTYPES: Final = tuple(getattr(torch, name, None) for name in wire.DTYPES)
"""By their number; None where this torch has no such one."""


class Lost(DeviceError):
    """Something needs a tensor that was never computed, or was not executed, because of an earlier error."""


class Tensors(dict[int, torch.Tensor]):
    """The tensors of a device, by id."""

    def __missing__(self, ident: int) -> torch.Tensor:
        raise Lost("a tensor that it needs was never computed, because of an earlier error")

    def usage(self, device: torch.device) -> dict[str, int]:
        """How many tensors there are, and bytes: allocated by them, free and in all."""
        found = {"tensors": len(self)}
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            return {**found, "allocated": torch.cuda.memory_allocated(device), "free": free, "total": total}
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.values()}
        return {**found, "allocated": sum(storages.values()), **_system()}


def _system() -> dict[str, int]:
    found = {}
    with contextlib.suppress(OSError):  # not Linux
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                found["total" if name == "MemTotal" else "free"] = int(rest.split()[0]) * 1024
    return found


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill its memory from the first to the last."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return bool(tensor.numel() == 0 or extent == tensor.numel())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements in order, in memory of this process."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    here = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return memoryview(here.reshape(-1).view(torch.uint8).numpy()) if here.numel() else memoryview(b"")
