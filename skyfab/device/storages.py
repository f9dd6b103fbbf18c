"""The remote storages of this program. When one is garbage collected, its tensors are freed on the host."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final


class RemoteStorage(weakref.ref[Any]):
    """A remote storage: a weak reference to PyTorch's object for it, and what the host knows it by.

    When that object is gone, this is appended to what its stream forgets with the next batch. The garbage collector
    may do so at any time, on any thread: nothing else happens then.
    """

    __slots__ = ("address", "id", "layout", "views")

    id: int
    """The id of the tensor that was made with the storage."""
    layout: Any
    """The `Layout` of that tensor."""
    views: dict[Any, tuple[Any, int]] | None
    """Other tensors of the same storage: their layouts and ids."""
    address: int


by_address: Final[dict[int, RemoteStorage]] = {}
"""By the address of the storage."""


def forget(dead: Sequence[RemoteStorage]) -> list[int]:
    """Forgets storages that are gone. Returns the ids of their tensors."""
    found: list[int] = []
    for storage in dead:
        try:
            del by_address[storage.address]
        except (AttributeError, KeyError):
            continue  # Ctrl-C came while it was being made: no instruction has named it
        found.append(storage.id)
        if storage.views:
            found += [ident for _, ident in storage.views.values() if ident != storage.id]
    return found
