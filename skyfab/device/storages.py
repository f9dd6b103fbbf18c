"""What is known of each remote storage. When the storage is gone here, its tensors are freed on the host."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final


class Record(weakref.ref[Any]):
    """What is known of a remote storage. It is the weak reference to the storage's object here.

    When the storage is gone, the record is appended to those that its stream forgets with the next batch. The garbage
    collector may do so at any time, on any thread: nothing else happens then.
    """

    __slots__ = ("address", "id", "layout", "views")

    id: int
    """The id of the tensor that was made with the storage."""
    layout: Any
    """The `Layout` of that tensor."""
    views: dict[Any, tuple[Any, int]] | None
    """Other tensors of the same storage: their layouts and ids."""
    address: int


records: Final[dict[int, Record]] = {}
"""By the address of the storage."""


def forget(dead: Sequence[Record]) -> list[int]:
    """Forgets storages that are gone. Returns the ids of their tensors."""
    found: list[int] = []
    for record in dead:
        try:
            del records[record.address]
        except (AttributeError, KeyError):
            continue  # Ctrl-C came while it was being made: no instruction has named it
        found.append(record.id)
        if record.views:
            found += [ident for _, ident in record.views.values() if ident != record.id]
    return found
