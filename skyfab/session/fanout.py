"""Runs the same action for several hosts in parallel, on threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from skyfab._util.signals import GuardedCondition
from skyfab.errors import PoolError, SkyfabError, Unreachable, UsageError

S = TypeVar("S")
T = TypeVar("T")


class Raised:
    """Holds an exception instead of a result."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


_MOST: Final = 256
"""The maximum number of parallel threads. They mostly wait for hosts."""
PATIENCE: Final = 3.0
"""Seconds without the end of an action after which `enough` is asked. By default it never is."""


def for_each_host(
    action: Callable[[S], T], items: Sequence[S], enough: Callable[[], bool] = bool, *, most: int = _MOST
) -> list[T | Raised]:
    """Runs the action for each item and returns the results in order; Unreachable for what still runs when `enough`.

    `most` is the number of parallel threads: all of them, where an action waits for those of others.

    Uses daemon threads: after a Ctrl-C the program does not wait for them. Signal handlers never interrupt the action,
    unless no thread can be started.
    """
    outcomes: dict[int, T | Raised] = {}
    places = iter(range(len(items)))
    running = min(len(items), most)
    ended = GuardedCondition()  # not `join`, which takes a thread for ended when a handler raises in it

    def work() -> None:
        nonlocal running
        for place in places:
            try:
                outcomes[place] = action(items[place])
            except BaseException as error:
                outcomes[place] = Raised(error)
        with ended:
            running -= 1
            ended.notify_all()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(running)]
    with ended:  # a thread whose start is interrupted may never run
        for thread in threads:
            try:
                thread.start()
            except RuntimeError:  # this machine lacks threads, or Python exits: the others do all the work
                if most != _MOST:
                    raise
                running -= 1
        is_alone = not running
        while running and (ended.wait(PATIENCE) or not enough()):
            pass
    if is_alone:
        work()
    return [outcomes.get(place, Raised(Unreachable("no response yet"))) for place in range(len(items))]


@contextmanager
def meanwhile(action: Callable[[], None]) -> Iterator[None]:
    """Runs the action on a thread during the block, which waits for it at its end."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def results_of(outcomes: Sequence[T | Raised]) -> list[T]:
    """The results of `for_each_host`. Raises the first error instead."""
    found = []
    for outcome in outcomes:
        if isinstance(outcome, Raised):
            raise outcome.error
        found.append(outcome)
    return found


def one_error(errors: Sequence[BaseException], total: int) -> BaseException:
    """The error to raise for those of some of `total` hosts.

    A single failure as it is, also a UsageError that is the same on all hosts; several as one PoolError.
    """
    first, known = errors[0], []
    for error in errors:
        if not isinstance(error, SkyfabError):
            return error
        known.append(error)
    if len(known) == 1:
        return first
    if all(isinstance(error, UsageError) and _words(error) == _words(known[0]) for error in known):
        known[0].host = None
        return first
    return PoolError(f"{len(known)} of {total} hosts failed", known)


def _words(error: SkyfabError) -> tuple[str, str | None]:
    return error.message, error.hint
