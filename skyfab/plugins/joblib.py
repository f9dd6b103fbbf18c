"""Plugin for joblib: the pool is the default backend, for `Parallel` and for scikit-learn's ``n_jobs``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from skyfab.plugins.base import Plugin
from skyfab.plugins.packages import pinned_as_here, with_packages

if TYPE_CHECKING:
    from skyfab.calls.image import Image
    from skyfab.context import InstanceInfo
    from skyfab.inventory.host import Host

_THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class Joblib(Plugin):
    """joblib's `Parallel` runs on the pool: ``n_jobs=-1`` is all slots of all hosts (docs/engines.md).

    A task of a lost host is moved to another one up to `retries` times, and may run twice. Hosts get joblib, and
    scikit-learn if this machine has it. In threads other than the one that opens the pool, pass ``backend="skyfab"``.
    """

    exclusive = "joblib's default backend"

    def __init__(self, *, retries: int = 0) -> None:
        self.retries = retries
        self.tasks = 1  # on a host at a time; known when the pool is open

    def transform(self, image: Image, host: Host) -> Image:
        """Adds the versions of this machine, because estimators are pickled here and unpickled there."""
        return with_packages(image, host, *pinned_as_here("joblib", "scikit-learn"))

    @contextmanager
    def around_process(self, info: InstanceInfo) -> Iterator[None]:
        """Numerical libraries share the cores, as in joblib's own processes."""
        for name in _THREADS:
            os.environ.setdefault(name, str(max(1, (os.cpu_count() or 1) // self.tasks)))
        yield

    @contextmanager
    def around_client(self, compute: Any) -> Iterator[None]:
        from joblib import parallel, parallel_config, register_parallel_backend

        from skyfab.engines.joblib_backend import SkyfabBackend

        slots = compute.executor().slots
        self.tasks = -(-slots // len(compute.hosts))
        before = parallel.BACKENDS.get("skyfab")
        register_parallel_backend("skyfab", lambda **options: SkyfabBackend(compute, slots, self.retries, **options))
        try:
            with parallel_config(backend="skyfab"):
                yield
        finally:
            parallel.BACKENDS.pop("skyfab", None)
            if before is not None:  # that of another pool, which was opened earlier
                register_parallel_backend("skyfab", before)
