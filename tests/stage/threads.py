"""Threads that cannot hold up the end of a test run: what they do is waited for, but not for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def begin(work: Callable[[], R]) -> Future[R]:
    """Does something on a thread of its own."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def at_once(work: Callable[[T], R], items: Iterable[T], timeout: float = 60.0) -> list[R]:
    """Applies `work` to all items, each on a thread of its own, all at the same time."""
    together = threading.Event()

    def one(item: T) -> R:
        together.wait()
        return work(item)

    futures = [begin(lambda item=item: one(item)) for item in items]  # type: ignore[misc]
    together.set()
    return [future.result(timeout) for future in futures]
