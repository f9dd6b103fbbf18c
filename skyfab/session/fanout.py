"""Abreast: the same thing done for several hosts at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

S = TypeVar("S")
T = TypeVar("T")


class Raised:
    """An exception in place of an answer."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


_MOST: Final = 256
"""Threads at a time. Those for hosts mostly wait."""


def for_each_host(action: Callable[[S], T], items: Sequence[S]) -> list[T | Raised]:
    """What became of each, in their order. On threads that nobody has to wait for, should there be a Ctrl-C."""
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
