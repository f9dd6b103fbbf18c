"""Dask: SSHCluster, with the scheduler on the first host and a worker on each. Its connections are plain TCP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dask.distributed import Client, SSHCluster

from benchmarks.peers import session, work
from benchmarks.peers.site import Site

# Functions of the program itself are sent by value; the hosts do not have this checkout.


def add_one(number: int) -> int:
    return number + 1


def square(number: int) -> int:
    return number * number


def hostname() -> str:
    import socket

    return socket.gethostname()


def reverse(array: Any) -> Any:
    return array[::-1].copy()


@contextmanager
def warm(site: Site) -> Iterator[session.Warm]:
    addresses = site.first(work.HOSTS)
    with (
        SSHCluster(
            [addresses[0], *addresses],
            connect_options={"config": [site.config]},
            worker_options={"nthreads": 1},
            scheduler_options={"port": 0, "dashboard": False},
            remote_python=site.python,
        ) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(len(addresses), timeout=60)
        first = min(client.scheduler_info()["workers"])

        yield session.warm(
            site,
            call=lambda number: client.submit(add_one, number, pure=False, workers=[first]).result(),
            everywhere=lambda: list(client.run(hostname).values()),
            squares=lambda numbers: client.gather(client.map(square, numbers, pure=False)),
            reverse=lambda array: client.submit(reverse, array, pure=False, workers=[first]).result(),
        )


if __name__ == "__main__":
    session.main({}, warm)
