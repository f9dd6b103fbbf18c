"""skyfab itself: the commands that a user would type, and a pool for the warm jobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import skyfab as sky
from benchmarks.peers import session, work
from benchmarks.peers.site import Site


@contextmanager
def warm(site: Site) -> Iterator[session.Warm]:
    add_one, square, hostname, reverse = map(sky.function, (work.add_one, work.square, work.hostname, work.reverse))
    hosts = ",".join(site.names[: work.HOSTS])
    first = site.names[0]
    with (
        sky.Compute(hosts, inventory=site.inventory, ui="none") as compute,
        sky.Compute(first, inventory=site.inventory, ui="none") as alone,
    ):
        yield session.warm(
            site,
            call=lambda number: add_one(number) >> alone,
            everywhere=lambda: hostname() @ compute,
            squares=lambda numbers: compute.map(square, numbers),
            reverse=lambda array: reverse(array) >> alone,
        )


if __name__ == "__main__":
    session.main({}, warm)
