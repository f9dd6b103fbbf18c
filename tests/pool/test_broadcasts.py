"""Several broadcasts at once: all ranks see them in one order, and cancelling one stops that one and no other."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stage.spot import Spot, until
from stage.threads import at_once

import skyfab as sky

OpenPool = Callable[..., sky.Compute]


def remember(name: str, *_: object) -> list[str]:
    """Appends to what this process has run so far, and returns all of it."""
    import builtins

    seen: list[str] = builtins.__dict__.setdefault("_calls_seen", [])
    seen.append(name)
    return list(seen)


def test_ranks_see_broadcasts_of_several_threads_in_one_order(open_pool: OpenPool) -> None:
    """Else two ranks each wait in a collective of another call, for ever."""
    pool = open_pool("local", ranks=3)
    record = sky.function(remember)

    def many(thread: int) -> None:
        for number in range(40):
            record(f"{thread}.{number}") @ pool

    at_once(many, range(4))
    first, *others = record("last") @ pool
    assert len(first) == 161
    assert all(seen == first for seen in others)


def test_a_small_broadcast_does_not_overtake_a_large_one(open_pool: OpenPool) -> None:
    """One host is slow to take the large one's arguments, and got the small one first."""
    pool = open_pool("local", count=2)
    record = sky.function(remember)
    slow = pool.hosts[1]
    held, let_go = list[Callable[[], None]](), threading.Event()
    store = slow.store.add

    def hold_back(content: Any, then: Callable[[], None], failure: Any, *, keep: bool = False) -> None:
        def later() -> None:
            held.append(then)
            threading.Thread(target=lambda: (let_go.wait(30), then())).start()

        store(content, then if keep else later, failure, keep=keep)

    slow.store.add = hold_back  # type: ignore[method-assign]
    large = pool.submit(record("large", np.ones(500_000)), on="all")
    until(lambda: bool(held))
    small = pool.submit(record("small"), on="all")
    time.sleep(0.2)
    let_go.set()
    assert small.result(170) == [["large", "small"]] * 2
    assert large.result(170) == [["large"]] * 2


def test_cancelling_a_broadcast_stops_that_one_and_no_other(open_pool: OpenPool, spot: Spot) -> None:
    begun, ended = spot / "begun", spot / "ended"

    @sky.function
    def nap() -> None:
        Path(f"{begun}.{sky.instance_info().rank}").touch()
        time.sleep(60)
        Path(ended).touch()

    pool = open_pool("openssh", count=2)
    first = pool.submit(nap(), on="all")
    until(lambda: {"begun.0", "begun.1"} <= spot.names())
    second = pool.submit(sky.function(lambda: sky.instance_info().rank)(), on="all")
    assert first.cancel()
    assert second.result(170) == [0, 1], "the one behind it runs"
    assert first.cancelled()
    assert "ended" not in spot.names()


def test_a_rank_that_fails_takes_only_its_own_broadcast_along(open_pool: OpenPool) -> None:
    """The ranks that hang because of it are stopped, and not what waits behind them."""

    @sky.function
    def uneven() -> None:
        if sky.instance_info().rank == 0:
            raise ValueError("only here")
        time.sleep(600)

    pool = open_pool("local", ranks=2)
    first = pool.submit(uneven(), on="all")
    second = pool.submit(sky.function(lambda: sky.instance_info().rank)(), on="all")
    with pytest.raises(sky.BroadcastError) as raised:
        first.result(170)
    assert isinstance(raised.value.exceptions[0], ValueError)
    assert second.result(170) == [0, 1]


def test_a_broadcast_that_is_stopped_and_returns_leaves_the_next_one_alone(open_pool: OpenPool) -> None:
    """Its processes are ended all the same: the next broadcast must not go to them."""

    @sky.function(timeout=2)
    def save_and_return() -> str:
        saved: list[int] = []
        signal.signal(signal.SIGTERM, lambda *_: saved.append(1))
        while not saved:
            time.sleep(0.01)
        return "saved"

    pool = open_pool("local", ranks=2)
    for _ in range(2):
        assert save_and_return() @ pool == ["saved"] * 2
        assert sky.function(lambda: sky.instance_info().rank)() @ pool == [0, 1]
