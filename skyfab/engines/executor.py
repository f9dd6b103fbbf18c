"""`PoolExecutor`: a pool as a `concurrent.futures.Executor`, for code that takes one.

Its futures behave as the standard library documents, unlike those of calls: once the pool has a call, `cancel` returns
False. A thread of the executor waits for each call that the pool has, and runs its callbacks, which may submit more.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import Future
from typing import Any, TypeVar

from skyfab import context
from skyfab._util.signals import SIGNAL_GUARD, GuardedFuture
from skyfab.calls.call import Call, as_function
from skyfab.errors import CallCancelled, HostLost, UsageError

R = TypeVar("R")


class PoolExecutor(futures.Executor):
    """Runs calls on the slots of a pool. `Compute.executor` makes it."""

    def __init__(self, pool: Any, slots: int, *, gpus: float = 0, limit: int | None = None) -> None:
        """`limit` is how many calls the pool has at a time; None: two for each slot, so that no slot waits.

        `gpus` is how many each call has for itself; 0: as its function says.
        """
        self._options = {"gpus": gpus} if gpus else {}
        self.slots = slots
        """How many calls run in parallel, on all hosts."""
        self._pool = pool
        self._threads = futures.ThreadPoolExecutor(limit or 2 * slots, thread_name_prefix="skyfab-executor")
        self._given: dict[Future[Any], Future[Any] | None] = {}
        """The futures of calls that have not ended; with that of the pool, once the pool has the call."""
        self._is_stopped = False
        self._process = os.getpid()

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Calls `fn` on a host: any callable that can be pickled, a ``@sky.function`` with its timeout and retries."""
        if self._process != os.getpid():
            raise UsageError("this executor belongs to another process, and only that process can submit to it")
        if not self._pool.is_open:
            raise UsageError("the pool of this executor is closed", hint="use it inside the pool's with block")
        call, future = as_function(fn)(*args, **kwargs), GuardedFuture()
        with SIGNAL_GUARD:
            self._given[future] = None
            try:
                self._threads.submit(self._run, future, call)
            except RuntimeError:  # it is shut down; that may wait for this future already
                del self._given[future]
                future.cancel()
                future.set_running_or_notify_cancel()
                raise
        return future

    def map(self, fn: Callable[..., R], *iterables: Iterable[Any], chunksize: int = 1, **options: Any) -> Iterator[R]:
        """As for any executor, with the `options` of this version of Python; `chunksize` items are sent as one call.

        Items of a function with a timeout are calls of their own.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        if chunksize == 1 or as_function(fn).timeout is not None:
            return super().map(fn, *iterables, **options)
        items = zip(*iterables, strict=False)
        chunks = iter(lambda: list(itertools.islice(items, chunksize)), [])
        chunked: Any = as_function(fn).rewrap(_chunked)
        return itertools.chain.from_iterable(super().map(chunked, chunks, **options))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Does nothing in a forked child: the calls are the parent's."""
        if self._process != os.getpid():
            return
        with SIGNAL_GUARD:
            self._threads.shutdown(wait=False)
            for future in list(self._given) if cancel_futures else ():
                future.cancel()
        if wait:
            futures.wait(list(self._given))
            self._threads.shutdown()  # its threads call the callbacks

    def stop(self) -> None:
        """Shuts down, and stops the calls that run."""
        self._is_stopped = True
        self.shutdown(wait=False, cancel_futures=True)
        if self._process != os.getpid():
            return
        for given in list(self._given.values()):
            if given is not None:
                given.cancel()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for all calls, as any executor does, except that Ctrl-C stops them."""
        if kind is not None and not issubclass(kind, Exception):
            self.stop()
        try:
            self.shutdown()
        except BaseException:
            self.stop()
            raise

    def _run(self, future: Future[Any], call: Call[Any]) -> None:
        """Has the pool run a call, and waits for it. On a thread of the executor."""
        if future.set_running_or_notify_cancel():
            try:
                given = self._given[future] = self._pool.submit(call, **self._options)
                if self._is_stopped:
                    given.cancel()
                future.set_result(given.result())
            except BaseException as error:  # without its frames, which refer to the arguments
                future.set_exception(self._translated(error).with_traceback(None))
        del self._given[future]

    def _translated(self, error: BaseException) -> BaseException:
        """The exception that programs expect of an executor."""
        if isinstance(error, CallCancelled):  # the pool was closed
            return futures.CancelledError(str(error))
        if isinstance(error, UsageError) and not self._pool.is_open:
            return futures.CancelledError("the pool was closed before the call began")
        if isinstance(error, HostLost) and all(node.lost is not None for node in self._pool.hosts):
            broken = futures.BrokenExecutor(f"every host of the pool is lost: {error}")
            broken.__cause__ = error
            return broken
        return error


def _chunked(fn: Callable[..., R]) -> Callable[[list[tuple[Any, ...]]], list[R]]:
    def chunk(items: list[tuple[Any, ...]]) -> list[R]:
        return [context.awaited(fn(*arguments)) for arguments in items]

    chunk.__qualname__ = getattr(fn, "__qualname__", "chunk")  # what users see of it
    return chunk
