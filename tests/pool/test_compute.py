"""A pool on this machine: opened, closed, dropped, forked, and over connections that are there already."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import skyfab as sky
from skyfab._util.signals import SIGNAL_GUARD
from skyfab.inspect.survey import SURVEY
from skyfab.providers.base import Provider
from skyfab.session.ask import Asker


@pytest.fixture
def host(home: Path) -> sky.Host:
    return sky.Host(name="here", transport="local", cache=str(home / "cache"))


double = sky.function(lambda number: 2 * number)


def test_a_pool_is_opened_and_closed_once(host: sky.Host) -> None:
    pool = sky.Compute([host], ui="none")
    pool.close()
    with pytest.raises(sky.UsageError, match="the pool is not open"):
        double(1) >> pool
    with pool as opened:
        assert opened is pool
        assert pool.open() is pool
        assert double(2) >> pool == 4
        assert double(3) @ pool == [6]
        nodes = pool.hosts
    pool.close()
    with pytest.raises(sky.UsageError, match="the pool is not open"):
        double(1) >> pool
    with pool:
        assert pool.hosts != nodes
        assert double(4) >> pool == 8


def test_a_forked_child_leaves_the_pool_alone(host: sky.Host) -> None:
    with sky.Compute([host], ui="none") as pool:
        assert double(1) >> pool == 2
        child = os.fork()
        if not child:
            status = 1
            try:
                with pytest.raises(sky.UsageError, match="opened by the process that this one was forked from"):
                    double(1) >> pool
                pool.close()
                with pytest.raises(sky.UsageError, match="forked from"):
                    pool.open()
                assert repr(pool).endswith(": not open>")
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert double(2) >> pool == 4


def test_a_pool_that_is_dropped_closes_itself_and_says_so(host: sky.Host) -> None:
    def drop() -> None:
        pools.clear()
        gc.collect()

    pools = [sky.Compute([host], ui="none").open()]
    assert double(1) >> pools[0] == 2
    with pytest.warns(ResourceWarning, match="a pool was dropped while it was open: here"):
        drop()
    closed = sky.Compute([host], ui="none")
    with closed, warnings.catch_warnings():
        warnings.simplefilter("error")
    del closed
    gc.collect()


def test_ctrl_c_at_the_end_of_opening_leaves_nothing_open(host: sky.Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("skyfab.pool.broadcasts.Broadcasts.open", interrupted)
    others = SIGNAL_GUARD._users
    pool = sky.Compute([host], ui="none")
    with pytest.raises(KeyboardInterrupt):
        pool.open()
    assert not pool.is_open
    assert SIGNAL_GUARD._users == others
    [node] = pool._nodes.nodes
    assert node.session.has_ended


def test_a_pool_over_connections_that_are_there(host: sky.Host) -> None:
    pool = sky.Compute([host], ui="none")
    with Asker([host], pool.inventory) as asker:
        asker.ask_one(SURVEY, host)
        with pool.over(asker) as opened:
            assert opened is pool
            assert double(2) >> pool == 4
            assert asker.take(host) is None, "the pool has it"
    with pool:
        assert double(3) >> pool == 6, "the next time over new ones"


def test_the_hosts_of_a_provider_go_with_the_pool(host: sky.Host) -> None:
    class Rented(Provider):
        def start(self, tell: Callable[[str], None] = print) -> sky.Inventory:
            calls.append("start")
            return sky.Inventory(hosts={"here": host})

        def stop(self) -> None:
            calls.append("stop")

    calls: list[str] = []
    with sky.Compute(provider=Rented(), ui="none") as pool:
        assert double(2) >> pool == 4
        assert calls == ["start"]
        for use in (lambda: 5 >> pool, lambda: 5 @ pool):
            with pytest.raises(sky.UsageError, match="not a call"):
                use()
    assert calls == ["start", "stop"]
