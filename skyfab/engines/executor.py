"""`PoolExecutor`: a pool as a `concurrent.futures.Executor`, for code that takes one.

Its futures behave as the standard library documents, unlike those of calls: once the pool has a call, `cancel` returns
False. Callbacks run in order on one thread of the executor, which exists while there are calls, and may submit more.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from skyfab._util.signals import SIGNAL_GUARD, GuardedFuture
from skyfab.calls.call import Call, as_function
from skyfab.errors import HostLost, UsageError

R = TypeVar("R")


class PoolExecutor(futures.Executor):
    """Runs calls on the slots of a pool. `Compute.executor` makes it."""

    def __init__(self, pool: Any, slots: int, *, gpus: int = 0, limit: int | None = None) -> None:
        """`limit` is how many calls the pool has at a time; None: two for each slot, so that no slot waits."""
        if gpus != 0:
            raise UsageError(f"invalid gpus={gpus!r}: expected 0, because GPUs cannot be reserved for calls yet")
        self.slots = slots
        """How many calls run in parallel, on all hosts."""
        self._pool = pool
        self._limit = limit or 2 * slots
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[Any], Call[Any]]] = deque()
        self._given: dict[Future[Any], Future[Any]] = {}
        """The executor's future of each call that the pool has, and the pool's future of it."""
        self._ended: SimpleQueue[tuple[Future[Any], Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_shut = self._is_stopped = False

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Calls `fn` on a host: any callable that can be pickled, a ``@sky.function`` with its timeout and retries."""
        with SIGNAL_GUARD:
            call, future = as_function(fn)(*args, **kwargs), GuardedFuture()
            with self._lock:
                if self._is_shut:
                    raise RuntimeError("cannot schedule new futures after shutdown")
                self._waiting.append((future, call))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._attend, name="skyfab-executor", daemon=True)
                    self._thread.start()
            self._advance()
        return future

    def map(self, fn: Callable[..., R], *iterables: Iterable[Any], chunksize: int = 1, **options: Any) -> Iterator[R]:
        """As for any executor, with the `options` of this version of Python; `chunksize` items are sent as one call."""
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        if chunksize == 1:
            return super().map(fn, *iterables, **options)
        items = zip(*iterables, strict=False)
        chunks = iter(lambda: list(itertools.islice(items, chunksize)), [])
        chunked: Any = as_function(fn).rewrap(_chunked)
        return itertools.chain.from_iterable(super().map(chunked, chunks, **options))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with SIGNAL_GUARD, self._lock:
            self._is_shut = True
            dropped = [self._waiting.pop() for _ in range(len(self._waiting) if cancel_futures else 0)]
            left, thread = [*self._given, *(future for future, _ in self._waiting)], self._thread
            self._ended.put(None)
        for future, _ in dropped:
            future.cancel()
            future.set_running_or_notify_cancel()
        if wait:
            futures.wait(left)
            if thread is not None and thread is not threading.current_thread():
                thread.join()  # it calls the callbacks

    def stop(self) -> None:
        """Shuts down, and stops the calls that run."""
        self._is_stopped = True
        self.shutdown(wait=False, cancel_futures=True)
        for given in list(self._given.values()):
            given.cancel()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for all calls, as any executor does, except that Ctrl-C stops them."""
        if kind is not None and not issubclass(kind, Exception):
            self.stop()
        self.shutdown()

    def _advance(self) -> None:
        """Gives waiting calls to the pool, up to the limit. On any thread but the one that reads replies."""
        while True:
            with SIGNAL_GUARD, self._lock:
                if not self._waiting or len(self._given) >= self._limit:
                    return
                future, call = self._waiting.popleft()
                if not future.set_running_or_notify_cancel():
                    self._ended.put(None)
                    continue
                self._given[future] = Future()  # counts for the limit, while other threads advance too
            try:
                given: Future[Any] = self._pool.submit(call)
            except Exception as error:  # it cannot be pickled, or the pool is closed
                given = Future()
                given.set_exception(error)
            self._given[future] = given
            if self._is_stopped:
                given.cancel()
            # On the thread that reads replies, which must not wait; `CallFuture` would start another for it.
            Future.add_done_callback(given, lambda given, future=future: self._ended.put((future, given)))  # type: ignore[misc]

    def _attend(self) -> None:
        """Runs on its own thread while there are calls."""
        while True:
            if (ended := self._ended.get()) is not None:
                self._end(*ended)
            del ended  # else its result would be kept until the next one
            with self._lock:
                if not self._given and not self._waiting:
                    self._thread = None
                    return

    def _end(self, future: Future[Any], given: Future[Any]) -> None:
        del self._given[future]
        self._advance()
        error = futures.CancelledError() if given.cancelled() else given.exception()
        if isinstance(error, HostLost) and all(node.lost is not None for node in self._pool.hosts):
            cause, error = error, futures.BrokenExecutor(f"every host of the pool is lost: {error}")
            error.__cause__ = cause
        if error is None:
            future.set_result(given.result())
        else:
            future.set_exception(error)


def _chunked(fn: Callable[..., R]) -> Callable[[list[tuple[Any, ...]]], list[R]]:
    def chunk(items: list[tuple[Any, ...]]) -> list[R]:
        return [fn(*arguments) for arguments in items]

    chunk.__qualname__ = getattr(fn, "__qualname__", "chunk")  # what users see of it
    return chunk
