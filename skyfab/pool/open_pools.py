"""The pools that are open in this process: what becomes of them in a forked child, and when a program drops them."""

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
    """A pool, as far as it matters here."""

    def close(self) -> None:
        """Ends it."""

    def leave_to_parent(self) -> None:
        """It is the parent's: in this process it can be neither used nor ended."""


_open: Final[weakref.WeakSet[Pool]] = weakref.WeakSet()

add = _open.add
discard = _open.discard


def parents_pool() -> UsageError:
    """For a use of a pool in a child that was forked while it was open."""
    return UsageError(
        "this pool was opened by the process that this one was forked from",
        hint="open one here: with sky.Compute(…) as compute: …",
    )


def close_dropped(pool: Pool, hosts: Sequence[str]) -> None:
    """Closes a pool that its program has dropped: on a thread, as this may be any one, with any lock held."""
    if not sys.is_finalizing():
        text = f"a pool was dropped while it was open: {', '.join(hosts)}"
        warnings.warn(text, ResourceWarning, stacklevel=3, source=pool)
        threading.Thread(target=pool.close, daemon=True).start()


def _leave_all_to_parent() -> None:
    for pool in list(_open):
        pool.leave_to_parent()
    _open.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)
