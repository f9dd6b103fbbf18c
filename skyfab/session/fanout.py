"""Runs the same action for several hosts in parallel, on threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

S = TypeVar("S")
T = TypeVar("T")


class Raised:
    """Holds an exception in place of a result."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


_MOST: Final = 256
"""The maximum number of parallel threads. They mostly wait for hosts."""


def for_each_host(action: Callable[[S], T], items: Sequence[S]) -> list[T | Raised]:
    """Runs the action for each item and returns the results in order.

    Uses daemon threads: after a Ctrl-C the program does not wait for them.
    """
    outcomes: dict[int, T | Raised] = {}
    places = iter(range(len(items)))

    def work() -> None:
        for place in places:
            try:
                outcomes[place] = action(items[place])
            except BaseException as error:
                outcomes[place] = Raised(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(len(items), _MOST))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[place] for place in range(len(items))]
