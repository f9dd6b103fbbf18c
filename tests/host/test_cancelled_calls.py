"""Cancelled calls: one that is stopped costs neither its slot nor any other call."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import CancelledError

import pytest
from stage.remote import leave
from stage.spot import Spot, until

import skyfab as sky


@sky.function
def add(n: int) -> int:
    return n + 10


def save_and_return(path: str) -> str:
    """What a careful training loop does: SIGTERM asks it to save, and then it is done."""
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    leave(path, str(os.getpid()))
    while not asked:
        time.sleep(0.005)
    return "saved"


@pytest.mark.parametrize("end", ["cancel", "timeout"])
def test_a_call_that_saves_and_returns_when_it_is_stopped_does_not_cost_its_slot(
    open_pool: Callable[..., sky.Compute], spot: Spot, end: str
) -> None:
    pool = open_pool("local", count=1)
    assert add(1) >> pool == 11  # its module is imported there: a timeout counts from when a call is given to a process
    running = sky.function(timeout=1.0 if end == "timeout" else None)(save_and_return)(spot / "pid") > pool
    ((_, pid),) = spot.read("pid").items()
    if end == "cancel":
        assert running.cancel()
        with pytest.raises(CancelledError):
            running.result(170)
    else:
        assert running.result(170) == "saved", "what it returns in time is its result"
    assert sky.function(os.getpid)() >> pool != int(pid), "its process is replaced"
    assert add(1) >> pool == 11


def test_calls_are_stopped_as_soon_after_their_zygote_was_replaced(open_pool: Callable[..., sky.Compute]) -> None:
    """The new zygote is forked from the agent, whose handler of SIGTERM its workers must not have."""
    pool = open_pool("local", count=1)
    os.kill(sky.function(os.getppid)() >> pool, signal.SIGKILL)

    def again() -> bool:
        try:
            return add(1) >> pool == 11
        except sky.WorkerDied:  # it was sent to a process that Linux has just killed
            return False

    until(again, "a call in a process of the new zygote")
    assert sky.function(signal.getsignal)(signal.SIGTERM) >> pool == signal.SIG_DFL
    began = time.monotonic()
    with pytest.raises(sky.CallTimeout):
        sky.function(timeout=1.0)(time.sleep)(60) >> pool
    assert time.monotonic() - began < 2.9, "the process was given the two seconds of one that ignores SIGTERM"


def cancel_one_of_twelve(pool: sky.Compute, seed: int, rounds: int) -> int:
    """Short calls, of which one is cancelled, again and again; returns how many were answered."""
    chance = random.Random(seed)
    answered = 0
    for number in range(rounds):
        futures = [add(n) > pool for n in range(12)]
        chosen = chance.randrange(12)
        if chance.random() < 0.7:
            time.sleep(chance.random() * 0.003)
        cancelled = futures[chosen].cancel()
        for n, future in enumerate(futures):
            if n != chosen or not cancelled:
                assert future.result(170) == n + 10, f"seed {seed}, round {number}"
                answered += 1
    return answered


def test_calls_beside_one_that_is_cancelled_are_answered(open_pool: Callable[..., sky.Compute]) -> None:
    pool = open_pool("local", count=1)
    assert [add(n) >> pool for n in range(50)]  # short calls: the queue hands them out ahead
    assert cancel_one_of_twelve(pool, seed=1, rounds=30) >= 30 * 11
