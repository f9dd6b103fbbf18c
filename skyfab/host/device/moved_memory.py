"""Moves the memory of tensors that are not used into that of the host, and back.

Storages are emptied in place and filled again: tensors, their views, and what autograd has saved of them stay valid.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from skyfab.host.device.memory import storages_of


class MovedMemory:
    """Storages whose bytes are in the host's memory."""

    def __init__(self) -> None:
        self._moved: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        """Each with its copy."""

    def size(self) -> int:
        """How many bytes there are."""
        return sum(copy.nbytes() for _, copy in self._moved)

    def move_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Moves the memory of these tensors, except such that PyTorch cannot free: that of a received message."""
        for storage in storages_of(tensors):
            if storage.nbytes() and storage.resizable():
                copy = torch.UntypedStorage(storage.nbytes(), device="cpu")
                copy.copy_(storage, non_blocking=False)
                self._moved.append((storage, copy))
                storage.resize_(0)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Moves everything back. Raises OutOfMemoryError; what is then not back can be moved later."""
        while self._moved:
            storage, copy = self._moved[-1]
            storage.resize_(copy.nbytes())
            storage.copy_(copy, non_blocking=False)
            self._moved.pop()
