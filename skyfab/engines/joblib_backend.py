"""`SkyfabBackend`: joblib's tasks as calls of a pool. Imported only where joblib is used, on hosts too."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from joblib.parallel import AutoBatchingMixin, FallbackToBackend, ParallelBackendBase, SequentialBackend

from skyfab.calls.call import Function
from skyfab.calls.refs import Ref, put
from skyfab.engines.executor import PoolExecutor
from skyfab.protocol.blobs import LARGE


class SkyfabBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]  # joblib has no types
    """A backend of joblib. Each `Parallel` uses a copy of the configured one, so that it stops only its own tasks."""

    supports_retrieve_callback = True
    default_n_jobs = -1  # as for Dask: with 1, joblib would run tasks in this program
    retrieve_result_callback = staticmethod(Future.result)
    executor: PoolExecutor

    def __init__(self, pool: Any, slots: int, retries: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.is_copy = False
        self.arrays: dict[int, tuple[weakref.ref[Any], Ref[Any] | None]] = {}
        """Large arrays of the current call by id; with a reference, from the second task that has it on."""
        self._compute, self._slots = pool, slots
        self._function = Function(joblib_batch, retries=retries)

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """All slots for -1, all but one for -2 … For one slot it is 2: joblib runs a single job in this program."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        most = max(2, self._slots)
        wanted = -1 if n_jobs is None else n_jobs
        return min(most, wanted if wanted > 0 else max(1, most + 1 + wanted))

    def configure(self, n_jobs: int = 1, parallel: Any = None, **_: Any) -> int:
        count = self.effective_n_jobs(n_jobs)
        if count == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        if not self.is_copy:
            own = copy.copy(self)
            own.is_copy, own.arrays = True, {}
            raise FallbackToBackend(own)
        self.parallel = parallel
        self.executor = PoolExecutor(self._compute, self._slots, limit=count if count < self._slots else None)
        return count

    def submit(self, func: Any, callback: Callable[[Future[Any]], object]) -> Future[Any]:
        """Does not raise: joblib calls it on other threads too, and would wait forever for a missing task."""
        try:
            func.items = [
                (fn, [*map(self._once, args)], {name: self._once(value) for name, value in named.items()})
                for fn, args, named in func.items
            ]
            future = self.executor.submit(self._function, func)
        except Exception as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(callback)
        return future

    def _once(self, value: Any) -> Any:
        """A reference to a large array that an earlier task has too: its content is sent to a host once, and stays."""
        size = getattr(value, "nbytes", 0)
        if not isinstance(size, int) or size < LARGE:
            return value
        seen, ref = self.arrays.get(id(value), (None, None))
        if seen is None or seen() is not value:  # another object had this id
            with suppress(TypeError):  # numpy's scalars have no weak references
                self.arrays[id(value)] = weakref.ref(value), None
            return value
        if ref is None:
            ref = put(value)
            self.arrays[id(value)] = seen, ref
        return ref

    def stop_call(self) -> None:
        self.arrays.clear()

    def terminate(self) -> None:
        self.executor.shutdown(wait=False)
        self.reset_batch_stats()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """A task has failed, or the results are no longer wanted."""
        self.executor.stop()
        if ensure_ready:
            self.configure(n_jobs=self.parallel.n_jobs, parallel=self.parallel)


def joblib_batch(batch: Any) -> list[Any]:
    """Runs on a host. By joblib's rule for nested calls, a `Parallel` in a task uses threads there.

    Large arrays are read-only, as with joblib's own processes: the tasks of a batch share them.
    """
    numpy = sys.modules.get("numpy")
    for _, args, named in batch.items:
        for value in (*args, *named.values()):
            if numpy is not None and isinstance(value, numpy.ndarray) and value.nbytes >= LARGE:
                value.flags.writeable = False
    return batch()  # type: ignore[no-any-return]
