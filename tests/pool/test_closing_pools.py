"""Calls that still run when another thread closes their pool."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from stage.spot import until

import skyfab as sky


@sky.function
def stay(path: str) -> None:
    Path(path).touch()
    time.sleep(600)


def stay_at(path: str) -> None:
    stay.fn(path)


WAYS: dict[str, Callable[[sky.Compute, str], Any]] = {
    "run": lambda pool, path: stay(path) >> pool,
    "retries": lambda pool, path: sky.function(retries=3)(stay_at)(path) >> pool,
    "broadcast": lambda pool, path: stay(path) @ pool,
    "map": lambda pool, path: pool.map(stay_at, [path]),
}


@pytest.mark.parametrize("way", WAYS)
def test_calls_that_run_when_the_pool_closes_are_cancelled(
    way: str, open_pool: Callable[..., sky.Compute], tmp_path: Path
) -> None:
    pool, path = open_pool(count=2), tmp_path / "began"
    with ThreadPoolExecutor(1) as thread:
        call: Future[Any] = thread.submit(WAYS[way], pool, str(path))
        until(path.exists)
        pool.close()
        with pytest.raises(sky.CallCancelled, match="the pool was closed") as raised:
            call.result(60)
    assert raised.value.host in ("here1", "here2")


def test_a_call_of_an_actor_says_that_the_pool_has_ended_it(open_pool: Callable[..., sky.Compute]) -> None:
    pool = open_pool()
    waiting = pool.actor(threading.Event)
    call = waiting.wait.submit()
    pool.close()
    with pytest.raises(sky.ActorLost, match="this program has ended it, or its pool"):
        call.result(60)


def test_hosts_are_left_also_if_closing_raises(
    open_pool: Callable[..., sky.Compute], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("a defect")

    pool = open_pool()
    monkeypatch.setattr(pool._broadcasts, "close", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        pool.close()
    assert pool.hosts[0].session.has_ended
