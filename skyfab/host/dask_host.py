"""Dask on one host: the scheduler, if it is the head, and workers, each with a nanny that starts it again if it dies.

Scheduler and nannies are in the process of the actor, the workers are its children: all of them end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import shutil
import tempfile
import threading

from skyfab import context
from skyfab.errors import HostUnfit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from typing import Any, TypeVar

    T = TypeVar("T")

LOOPBACK = "127.0.0.1"
_CLOSING = 2.0
"""Seconds for a worker to end by itself."""


class DaskHost:
    """The actor. All of its servers use TLS, and accept only connections with the certificate that they have too."""

    def __init__(self, address: str, certificate: str, key: str) -> None:
        """`address` is that of this host for the others. Raises HostUnfit if Dask is not installed."""
        self._address = f"[{address}]" if ":" in address else address
        self._folder = tempfile.mkdtemp(prefix="dask-", dir=context.own_folder())
        """For data that workers move to disk, and for the moment in which `ssl` reads the key from a file."""
        os.environ["TMPDIR"] = tempfile.tempdir = self._folder
        os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "warning")
        os.environ.setdefault("PYTHONUNBUFFERED", "1")  # a line that a task prints is shown at once
        try:
            import dask

            self._security = security(certificate, key)
        except ModuleNotFoundError as error:
            hint = "Compute(…, plugins=[sky.plugins.dask()]) installs it, except for a Python or lock that you chose"
            raise HostUnfit(f"Dask is not installed on the host: {error}", hint=hint) from None
        dask.config.set({"distributed.worker.http.routes": []})  # other users of the host could read what they serve
        self._servers: list[Any] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="dask", daemon=True).start()

    def schedule(self, secret: str) -> tuple[str, int]:
        """Starts the scheduler. Returns its address, and the port of the dashboard on this host's loopback.

        The dashboard responds only below the path ``/secret/``: other users of the host can connect to it too.
        """
        return self._run(self._schedule(secret))

    async def _schedule(self, secret: str) -> tuple[str, int]:
        from distributed import Scheduler
        from tornado.web import ErrorHandler

        scheduler = Scheduler(
            host=self._address,
            protocol="tls",
            security=self._security,
            dashboard_address=f"{LOOPBACK}:0",
            http_prefix=secret,
        )
        pages = scheduler.http_application
        find = pages.find_handler

        def find_below_secret(request: Any, **options: Any) -> Any:
            if hmac.compare_digest(request.path.lstrip("/").partition("/")[0].encode(), secret.encode()):
                return find(request, **options)
            return pages.get_handler_delegate(request, ErrorHandler, {"status_code": 404})

        pages.find_handler = find_below_secret
        self._servers.append(scheduler)
        await scheduler
        return scheduler.address, scheduler.http_server.port

    def join(self, scheduler: str, name: str, gpus: Sequence[int], workers: int | None, threads: int | None) -> None:
        """Starts workers, by default one for each GPU, and waits until the scheduler knows them."""
        self._run(self._join(scheduler, name, gpus, workers or len(gpus) or 1, threads))

    async def _join(self, scheduler: str, name: str, gpus: Sequence[int], count: int, threads: int | None) -> None:
        from dask.system import CPU_COUNT
        from distributed import Nanny

        for number in range(count):
            own = gpus[number::count]
            nanny = Nanny(
                scheduler,
                name=name if count == 1 else f"{name}-{number}",
                host=self._address,
                security=self._security,
                nthreads=threads or max(1, CPU_COUNT // count),
                memory_limit=1 / count,
                local_directory=self._folder,
                resources={"GPU": len(own)} if own else None,
                env={"CUDA_VISIBLE_DEVICES": ",".join(map(str, own))} if gpus else None,
                dashboard=False,
                dashboard_address=f"{LOOPBACK}:0",
            )
            self._servers.append(nanny)
        await asyncio.gather(*self._servers[-count:])

    def stop(self) -> None:
        """Ends the workers, then the scheduler, and deletes their files."""
        logging.getLogger("distributed.nanny").setLevel(logging.ERROR)  # it would warn of workers that it has to kill
        for server in reversed(self._servers):
            with contextlib.suppress(Exception):
                self._run(server.close(timeout=_CLOSING))
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def security(certificate: str, key: str) -> Any:
    """The same certificate for every end, and no other one is accepted."""
    from distributed import Security

    ends = ("client", "scheduler", "worker")
    own = {f"tls_{end}_cert": certificate for end in ends} | {f"tls_{end}_key": key for end in ends}
    return Security(require_encryption=True, tls_ca_file=certificate, **own)
