"""`Compute.dask`: the scheduler and the workers of Dask on the hosts of a pool, and their client in this program.

An actor on each host owns these processes, so that they end with the pool. The client connects only to the scheduler,
through SSH; this machine need not reach the workers.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

from skyfab._util.certificate import new_certificate
from skyfab._util.sizes import counted
from skyfab.errors import HostUnfit, SkyfabError, UsageError
from skyfab.host.dask_host import LOOPBACK, DaskHost, security
from skyfab.ui.events import Notice

if TYPE_CHECKING:
    import distributed

_LINE: Final = r"\+[-+]+\+\s+"
_PATCH_RELEASES: Final = rf"Mismatched versions found\s+{_LINE}\| Package .*\s+{_LINE}\| python .*\s+\+[-+]+\+\s*\Z"
"""Dask's warning that only the Python of this machine and that of hosts differ. Their minor versions are the same."""
_CLOSING: Final = 5.0
"""Seconds for all hosts to end Dask regularly; then its processes are killed."""


class DaskCluster(AbstractContextManager["distributed.Client"]):
    """Dask on the hosts of a pool, for one ``with`` block at a time. See `Compute.dask`."""

    def __init__(
        self, pool: Any, nodes: Sequence[Any], addresses: Sequence[str], *, workers: int | None, threads: int | None
    ) -> None:
        """The workers on `nodes` connect to each other at `addresses`. Raises UsageError."""
        for option, count in (("workers", workers), ("threads", threads)):
            if count is not None and (type(count) is not int or count < 1):
                raise UsageError(f"invalid {option}={count!r}: expected 1 or more")
        self._pool, self._nodes, self._addresses = pool, nodes, addresses
        self._counts = workers, threads
        self._running: ExitStack | None = None

    def __enter__(self) -> distributed.Client:
        """Raises HostUnfit if Dask is not installed on a host, UsageError if it is not on this machine."""
        if self._running is not None:
            raise UsageError("this Dask is already running", hint="compute.dask() starts another one")
        with ExitStack() as stack, ThreadPoolExecutor(len(self._nodes), "skyfab-dask") as several:
            client = self._start(stack, several)
            self._running = stack.pop_all()
        return client

    def __exit__(self, *_: object) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.close()

    def _start(self, stack: ExitStack, several: ThreadPoolExecutor) -> distributed.Client:
        pool, nodes = self._pool, self._nodes
        made = new_certificate()
        if made is None:
            raise UsageError("compute.dask() needs cryptography on this machine", hint="pip install cryptography")
        certificate, key = made
        pool.events.emit(Notice(host=nodes[0].name, text=f"starting Dask on {counted(len(nodes), 'host')}"))
        head, secret = nodes[0], secrets.token_urlsafe(16)

        def start(node: Any, address: str) -> Any:
            return stack.enter_context(pool.actor(DaskHost, address, certificate, key, on=node.name))

        starting = [several.submit(start, *each) for each in zip(nodes, self._addresses, strict=True)]
        dask, distributed = _import()
        hosts = [one.result() for one in starting]
        stack.callback(_stop, hosts)
        scheduler, dashboard = hosts[0].schedule(secret)
        joining = [
            host.join.submit(scheduler, node.name, node.gpus, *self._counts)
            for host, node in zip(hosts, nodes, strict=True)
        ]
        ports = (scheduler.removeprefix("tls://"), f"{LOOPBACK}:{dashboard}")
        forwards = [*several.map(lambda port: stack.enter_context(pool.forward(port, on=head.name, local=0)), ports)]
        url = f"{forwards[1].url}/{secret}/status"
        stack.enter_context(dask.config.set({"distributed.dashboard.link": url}))
        options = {"security": security(certificate, key), "direct_to_workers": False}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", _PATCH_RELEASES)
                client = distributed.Client(f"tls://{LOOPBACK}:{forwards[0].port}", **options)
            stack.callback(_close, client)
        except OSError as error:
            hint = "its SSH server must allow port forwarding: AllowTcpForwarding yes"
            raise HostUnfit(f"cannot connect to Dask's scheduler: {error}", host=head.name, hint=hint) from error
        for one in joining:
            one.result()
        pool.events.emit(Notice(host=head.name, text=f"Dask's dashboard: {url}"))
        return client


def _import() -> tuple[Any, Any]:
    try:
        import dask
        import distributed
    except ModuleNotFoundError as error:
        hint = "this program needs it too: uv pip install dask distributed"
        raise UsageError(f"Dask is not installed on this machine: {error}", hint=hint) from None
    return dask, distributed


def _close(client: distributed.Client) -> None:
    with suppress(Exception):  # it raises the error of the last attempt to connect to a lost scheduler
        client.close()


def _stop(hosts: Sequence[Any]) -> None:
    stopping = []
    for host in hosts:
        with suppress(SkyfabError):  # its process, or the host, is lost
            stopping.append(host.stop.submit())
    wait(stopping, _CLOSING)
