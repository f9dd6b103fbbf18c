"""Registry of the open pools of this process: disables them in a forked child, closes those that are dropped."""

from __future__ import annotations

import os
import sys
import threading
import warnings
import weakref
from collections.abc import Sequence
from typing import Final, Protocol

from skyfab.errors import UsageError


class Pool(Protocol):
    """The part of a pool that is used here."""

    def close(self) -> None:
        """Closes it."""

    def leave_to_parent(self) -> None:
        """It belongs to the parent process: in this one it can be neither used nor closed."""


_open: Final[weakref.WeakSet[Pool]] = weakref.WeakSet()

add = _open.add
discard = _open.discard


def parents_pool() -> UsageError:
    """The error for using a pool in a child that was forked while it was open."""
    return UsageError(
        "this pool was opened by the process that this one was forked from",
        hint="open one here: with sky.Compute(…) as compute: …",
    )


def close_dropped(pool: Pool, hosts: Sequence[str]) -> None:
    """Closes a garbage-collected pool. On a new thread: the collector may run on any thread, with any lock held."""
    if not sys.is_finalizing():
        text = f"a pool was dropped while it was open: {', '.join(hosts)}"
        warnings.warn(text, ResourceWarning, stacklevel=3, source=pool)
        threading.Thread(target=pool.close, daemon=True).start()


def _leave_all_to_parent() -> None:
    for pool in list(_open):
        pool.leave_to_parent()
    _open.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)
