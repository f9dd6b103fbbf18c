"""`map`: one function over many items, balanced over the slots of a pool.

Items that take less time than the round trip to a host are sent in groups. Groups begin with one item and grow
according to the execution time that the host reports, so that long items are sent one by one.
"""

from __future__ import annotations

import reprlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from skyfab.calls.call import Call, Errors
from skyfab.calls.pack import PackedCall, pack_arguments
from skyfab.calls.results import add_note
from skyfab.errors import ProtocolError, RemoteTraceback, printable
from skyfab.pool.futures import CallFuture
from skyfab.pool.scheduler import Scheduler
from skyfab.pool.task import Task
from skyfab.protocol import codec
from skyfab.protocol.batches import GROUP_BYTES, GROUP_PARTS, as_group

_WORTH: Final = 0.010
"""Seconds of work that a group should have at least."""
_GROWTH: Final = 4
_PACE: Final = 0.1
"""Seconds between two reports of progress."""
_LONG: Final = 1e9
"""More seconds than a group can take."""
_LONGEST: Final = 100
"""Most characters of an item in a message."""
_REPR: Final = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _LONGEST


class MapCall:
    """One `map` in progress."""

    def __init__(
        self,
        scheduler: Scheduler,
        each: PackedCall,
        calls: Sequence[Call[Any]],
        *,
        errors: Errors = "raise",
        progress: Callable[[int, bool], None],
    ) -> None:
        """`each` has all that the calls have in common. With ``errors="return"``, exceptions are results. `progress` is
        called now and then with how many items have a result, and whether the map failed.
        """
        self.future = CallFuture()
        self.future.label = each.label
        self.future.on_cancel = self._cancel
        self._scheduler = scheduler
        self._each = each
        self._calls = calls
        self._slots = scheduler.slots_for(each.gpus)
        self._results: list[Any] = [None] * len(calls)
        self._lock = threading.Lock()
        self._next = 0
        self._returned: list[range] = []
        """Items of groups that ended early, because the results of those before them are large."""
        self._left = len(calls)
        self._size = 1
        self._errors = errors
        self._most = len(calls) if each.timeout is None and errors == "raise" else 1
        """Largest group. If a timeout or an error is about one item, every item is a call of its own."""
        self._running: set[Task] = set()
        self._failed = False
        self._progress = progress
        self._tell_at = 0.0

    def start(self) -> CallFuture:
        """Gives every slot its first item. The future's result is a list in the items' order."""
        if not self._calls:
            self.future.settle([])
        try:
            for _ in range(min(self._slots, len(self._calls))):
                self._send()
        except BaseException as error:
            self._fail(error)
            raise
        return self.future

    def _send(self) -> None:
        """Sends the next group. Items that cannot be pickled are an error, or have it as their result."""
        while True:
            with self._lock:
                chosen = self._choose()
            if not chosen:
                return
            try:
                items = _packed(self._calls, chosen)
                break
            except Exception as error:
                if self._errors == "raise":
                    raise
                self._store(chosen.start, [error])
        groups = [*_groups(items)]
        if len(groups) > 1:
            self._most = len(groups[0][1])
        for at, group in groups:
            self._give(chosen.start + at, group)

    def _choose(self) -> range:
        """The items of the next group. None are left if it is empty. With the lock held."""
        if self.future.done():
            return range(0)
        if self._returned:
            found = self._returned.pop()
            count = min(self._most, len(found))
            if count < len(found):
                self._returned.append(found[count:])
            return found[:count]
        rest = len(self._calls) - self._next
        count = min(rest, max(1, min(self._size, self._most, -(-rest // (2 * self._slots)))))
        self._next += count
        return range(self._next - count, self._next)

    def _give(self, first: int, group: Sequence[codec.Payload]) -> None:
        count = len(group)
        task = Task(replace(self._each, arguments=as_group(group)))
        task.each = True
        with self._lock:
            if self.future.done():  # another group has failed while this one was packed
                return
            self._running.add(task)
        Future.add_done_callback(task.future, lambda future: self._came(task, first, count, future))
        self._scheduler.add(task)
        self.future.node = self.future.node or task.future.node

    def _came(self, task: Task, first: int, count: int, future: Future[Any]) -> None:
        with self._lock:
            self._running.discard(task)
        if future.cancelled():
            return
        try:
            self._take(task, first, count, future)
        except BaseException as error:  # an item's class may raise anything when it is pickled or shown
            self._fail(error)

    def _take(self, task: Task, first: int, count: int, future: Future[Any]) -> None:
        """Keeps the results of a group, and sends the next ones. Raises what prevents that."""
        error = future.exception()
        if error is not None:
            _say_which(error, self._calls, first, count)
        if error is not None and (self._errors == "raise" or not isinstance(error, Exception)):
            self._fail(error)
            return
        found: list[Any] = future.result() if error is None else [0.0, error]
        spent, *values = found or [None]
        if type(spent) is not float or not 0 <= spent < _LONG or not 1 <= len(values) <= count:
            raise ProtocolError("invalid reply to map")  # our code on the host did not produce this
        with self._lock:
            if len(values) < count:
                self._most = len(values)
                self._returned.append(range(first + len(values), first + count))
            self._size = self._worthwhile(len(values), spent, time.monotonic() - task.started)
        self._store(first, values)
        self._send()
        self._send()  # one more, so that the host has work while the next reply is in transit

    def _store(self, first: int, values: Sequence[Any]) -> None:
        with self._lock:
            self._results[first : first + len(values)] = values
            self._left -= len(values)
            done = not self._left
        if done or time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + _PACE
            self._progress(len(self._calls) - self._left, False)
        if done:
            self.future.settle(self._results)

    def _worthwhile(self, count: int, spent: float, elapsed: float) -> int:
        """The size of the next groups: enough work to outweigh the round trip."""
        wanted = max(_WORTH, elapsed - spent) / max(spent / count, 1e-7)
        return max(1, min(int(wanted), _GROWTH * max(count, 1)))

    def _fail(self, error: BaseException) -> None:
        """Only the first failure is reported; those of other groups are ignored."""
        with self._lock:
            first, self._failed = not self._failed, True
        if first:
            self._progress(len(self._calls) - self._left, True)
            self.future.settle(None, error)
            self._stop()

    def _cancel(self) -> None:
        self._progress(len(self._calls) - self._left, True)
        self._stop()

    def _stop(self) -> None:
        with self._lock:
            running = list(self._running)
            self._next = len(self._calls)
            self._returned.clear()
        for task in running:
            task.future.cancel()


def _say_which(error: BaseException, calls: Sequence[Call[Any]], first: int, count: int) -> None:
    """Adds to an error which item it comes from, as a note and as ``error.item_index``; or from which of several."""
    inner = error.__cause__.item if isinstance(error.__cause__, RemoteTraceback) else None
    if inner is None or not 0 <= inner < count:
        inner = 0 if count == 1 else None
    if inner is None:
        note = f"in the map: one of items {first} to {first + count - 1}"
    else:
        index = first + inner
        note = f"in the map: item {index}, {_short(calls[index].args)}"
    add_note(error, note)
    if inner is not None:
        with suppress(Exception):  # an exception of the user's may refuse attributes
            vars(error)["item_index"] = first + inner


def _short(arguments: tuple[Any, ...]) -> str:
    """An item as a message shows it, whatever its class does."""
    found = arguments[0] if len(arguments) == 1 else arguments
    try:
        text = _REPR.repr(found)
    except Exception:
        return f"a {type(found).__qualname__}"
    return printable(" ".join(text.split()))[:_LONGEST]


def _packed(calls: Sequence[Call[Any]], which: Sequence[int]) -> Sequence[codec.Payload]:
    """The arguments of these calls. Raises NotPicklable, naming the item and its argument."""
    dump, items, index = codec.dumper(), [], 0
    try:
        for index in which:
            items.append(dump(calls[index].args))
    except Exception:
        try:
            pack_arguments(calls[index])
        except Exception as error:
            _say_which(error, calls, index, 1)
            raise
        raise
    return items


def _groups(items: Sequence[codec.Payload]) -> Iterator[tuple[int, Sequence[codec.Payload]]]:
    """Divides items into groups that are not too large for a message, each with the index of its first item."""
    begin = size = parts = 0
    for index, item in enumerate(items):
        if index > begin and (size + item.size > GROUP_BYTES or parts + len(item.buffers) > GROUP_PARTS):
            yield begin, items[begin:index]
            begin, size, parts = index, 0, 0
        size, parts = size + item.size, parts + len(item.buffers)
    yield begin, items[begin:]
