"""`Meeting`: threads that each have a host open come together, and one of them does what needs all hosts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class Meeting(Generic[T]):
    """Waits for so many threads, each of which arrives with an item or leaves. Thread-safe."""

    def __init__(self, count: int, work: Callable[[Mapping[str, T]], None]) -> None:
        """`work` is called once with what has arrived, by name, when no other host is awaited."""
        self._work = work
        self._awaited = count
        self._items: dict[str, T] = {}
        self._left: set[str] = set()
        self._is_over = False
        self._changed = threading.Condition()

    def arrive(self, name: str, item: T) -> None:
        """Returns when the work is done."""
        with self._changed:
            self._items[name] = item
            self._awaited -= 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._awaited <= 0)
            if next(iter(self._items)) != name:
                self._changed.wait_for(lambda: self._is_over)
                return
        try:
            self._work(dict(self._items))
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def leave(self, name: str) -> None:
        """This one is not awaited any longer. Does nothing after it has arrived, or for the second time."""
        with self._changed:
            if name not in self._items and name not in self._left:
                self._left.add(name)
                self._awaited -= 1
                self._changed.notify_all()
