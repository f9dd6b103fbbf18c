"""Functions that fork: what they leave goes with their rank, and one process answers for a seat."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from stage.remote import leave, wait_for
from stage.spot import Spot, until

import skyfab as sky


@sky.function
def fork_a_daemon(path: str, never: str) -> None:
    """Twice, with a session of its own, and without becoming another program."""
    if not os.fork():
        os.setsid()
        if not os.fork():
            leave(path, str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    os.wait()
    wait_for(never, 600)


@sky.function
def ok(x: int) -> int:
    return x


def test_a_daemon_that_was_forked_goes_with_its_rank(
    open_pool: Callable[..., sky.Compute], spot: Spot, runs_on: Callable[[str, int], bool]
) -> None:
    pool = open_pool("openssh", host={"slots": 2})
    other = fork_a_daemon(spot / "other", spot / "never") > pool
    spot.wait("other")
    future = fork_a_daemon(spot / "daemon", spot / "never") > pool
    ((machine, daemon),) = spot.read("daemon").items()
    assert runs_on(machine, int(daemon))
    assert future.cancel()
    until(lambda: not runs_on(machine, int(daemon)), "the end of the daemon", 60)
    assert runs_on(machine, int(spot.notes("other")[machine])), "that of another rank stays"
    assert ok(1) >> pool == 1
    other.cancel()


def test_a_function_that_forks_and_returns_twice_is_answered_by_its_own_process(
    open_pool: Callable[..., sky.Compute],
) -> None:
    @sky.function
    def returns_twice() -> int:
        os.fork()
        return os.getpid()

    @sky.function
    def raises_twice() -> None:
        os.fork()
        raise LookupError(os.getpid())

    pool = open_pool("local", count=1)
    own = sky.function(os.getpid)() >> pool
    for _ in range(5):
        assert returns_twice() >> pool == own
        with pytest.raises(LookupError, match=str(own)):
            raises_twice() >> pool
    assert {sky.function(os.getpid)() >> pool for _ in range(20)} == {own}


class Echo:
    def echo(self, word: str) -> str:
        return word


def child_of(work: Callable[[], object]) -> str:
    """What the work raises in a forked child."""
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            work()
        except BaseException as error:
            os.write(writes, repr(error).encode()[:1000])
        finally:
            os._exit(0)
    os.close(writes)
    os.waitpid(pid, 0)
    with os.fdopen(reads) as text:
        return text.read()


def test_a_forked_child_cannot_use_what_only_its_parent_gets_replies_for(
    open_pool: Callable[..., sky.Compute],
) -> None:
    """Both would read from one pipe, and each would wait for what the other has read."""

    @sky.function
    def uses(echo: Any, values: Any) -> list[Any]:
        found = [child_of(lambda: echo.echo("child")), child_of(lambda: next(values))]
        return [*found, echo.echo("parent"), sum(values)]

    @sky.function
    def yields() -> Iterator[int]:
        yield 1
        if not os.fork():
            signal.alarm(60)  # else a child that waits would not end
        else:
            os.wait()
        yield os.getpid()

    pool = open_pool("local", count=1)
    *refused, echoed, total = uses(pool.actor(Echo), sky.stream(iter(range(10)))) >> pool
    assert all(text.startswith("RuntimeError") and "a forked child cannot use" in text for text in refused)
    assert (echoed, total) == ("parent", 45)
    assert len(set(yields() >> pool)) == 2
