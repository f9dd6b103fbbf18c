"""Who may wait for a call, and where: subscribers, forked children, and Ctrl-C at any moment."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import ExitStack

import pytest
from stage import traces
from stage.spot import until

import skyfab as sky
from skyfab.session import reader
from skyfab.ui.events import CallStarted, Event, Output

OpenPool = Callable[..., sky.Compute]
Subscribe = Callable[[Callable[[Event], None]], object]


@sky.function
def identity(value: object) -> object:
    return value


@sky.function
def say(text: str) -> str:
    print(text)
    return text


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.Compute]:
    """For tests that leave it as it was."""
    with sky.Compute("local", ui="none") as compute:
        yield compute


# ---- subscribers


@pytest.fixture
def subscribe(pool: sky.Compute) -> Iterator[Subscribe]:
    """``subscribe(function)``: until the end of the test."""
    with ExitStack() as stack:
        yield lambda function: stack.callback(pool.events.subscribe(function))


@pytest.mark.parametrize("kind", [CallStarted, Output])
def test_a_subscriber_that_makes_a_call_and_waits_is_told_that_it_cannot(
    pool: sky.Compute, subscribe: Subscribe, kind: type
) -> None:
    told: list[BaseException] = []

    def call(event: Event) -> None:
        if isinstance(event, kind) and not told:
            try:
                identity(1) >> pool
            except sky.UsageError as error:
                told.append(error)

    subscribe(call)
    assert say("a line") >> pool == "a line"
    assert [identity(2) >> pool, (identity(3) > pool).result(170)] == [2, 3]
    assert "thread" in str(told[0])


def test_a_subscriber_may_start_a_call_and_leave_it(pool: sky.Compute, subscribe: Subscribe) -> None:
    futures: list[object] = []

    def call(event: Event) -> None:
        if isinstance(event, Output) and not futures:
            futures.append(identity(5) > pool)

    subscribe(call)
    say("a line") >> pool
    (future,) = futures
    assert future.result(170) == 5  # type: ignore[attr-defined]


def test_a_subscriber_that_exits_ends_nothing(
    pool: sky.Compute, subscribe: Subscribe, capfd: pytest.CaptureFixture[str]
) -> None:
    def leave(event: Event) -> None:
        if isinstance(event, Output):
            sys.exit(3)

    subscribe(leave)
    future = say("a line") > pool
    wait([future], timeout=170)
    assert future.result(0) == "a line"
    assert identity(1) >> pool == 1
    assert "a subscriber failed" in capfd.readouterr().err


def test_a_subscriber_cannot_close_its_pool(pool: sky.Compute, subscribe: Subscribe) -> None:
    told: list[BaseException] = []

    def close(event: Event) -> None:
        if isinstance(event, Output):
            try:
                pool.close()
            except sky.UsageError as error:
                told.append(error)

    subscribe(close)
    assert say("a line") >> pool == "a line"
    assert told
    assert identity(1) >> pool == 1


def test_an_answer_that_cannot_be_handled_keeps_no_other_waiting(capfd: pytest.CaptureFixture[str]) -> None:
    ran: list[int] = []

    def fail() -> None:
        raise RecursionError

    reader.run([fail, lambda: ran.append(1)])
    assert ran == [1]
    assert "RecursionError" in capfd.readouterr().err


# ---- Ctrl-C


def interrupted(work: Callable[[], object], *, lasting: float, seed: int) -> int:
    """Does the work again and again, with SIGINT for the main thread at random moments; returns how many came.

    None is sent but while the work is tried, and the next one only after that has been caught: none can escape.
    """
    expected, over, chance = threading.Event(), threading.Event(), random.Random(seed)

    def send() -> None:
        while not over.wait(chance.uniform(0, 0.01)):
            if expected.is_set():
                expected.clear()
                os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    caught, deadline = 0, time.monotonic() + lasting
    while True:
        try:
            while time.monotonic() < deadline:
                expected.set()
                work()
            over.set()
            thread.join()
            time.sleep(0.01)  # for the last one
            return caught
        except KeyboardInterrupt:
            caught += 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # those that a weak reference's end met
@pytest.mark.parametrize("how", ["run", "submit"])
@pytest.mark.slow
def test_an_interrupt_at_any_moment_leaves_the_pool_whole(open_pool: OpenPool, how: str) -> None:
    pool = open_pool("local", ranks=2, host={"slots": 2})
    identity(0) @ pool
    ways: dict[str, Callable[[], object]] = {
        "run": lambda: identity(1) >> pool,
        "submit": lambda: (identity(1) > pool).result(),
    }
    caught = interrupted(ways[how], lasting=3, seed=7)
    assert caught > 5
    assert [identity(n) >> pool for n in range(20)] == list(range(20))
    assert wait([identity(n) > pool for n in range(20)], timeout=170).not_done == set()
    assert identity(1) @ pool == [1, 1]


# ---- fork


def in_child(work: Callable[[], object]) -> str:
    """What `work` returns or raises in a forked child, as text."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            try:
                text = repr(work())
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
            os.write(writer, text.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return text


def test_a_forked_child_that_leaves_the_block_ends_nothing(open_pool: OpenPool) -> None:
    pool = open_pool("openssh")
    assert identity(1) >> pool == 1
    assert in_child(pool.close) == "None"
    assert [identity(n) >> pool for n in range(50)] == list(range(50))


def test_a_forked_child_cannot_use_the_pool_and_is_told_so(open_pool: OpenPool) -> None:
    pool = open_pool("fabric")
    future = sky.function(time.sleep)(1) > pool
    assert "UsageError" in in_child(lambda: identity(1) >> pool)
    assert "UsageError" in in_child(lambda: future.result(1))
    assert "UsageError" in in_child(lambda: identity(1) @ pool)
    assert [identity(n) >> pool for n in range(50)] == list(range(50))


def test_a_child_that_outlives_the_program_does_not_keep_its_connections(open_pool: OpenPool) -> None:
    pool = open_pool("openssh")
    identity(1) >> pool

    streams = {f"pipe:[{os.fstat(fd).st_ino}]" for fd in _pipes_of(pool)}
    assert streams
    held = in_child(traces.descriptors)
    assert not any(name in held for name in streams)


def _pipes_of(pool: sky.Compute) -> list[int]:
    stream = pool.hosts[0].session.connection.stream
    assert stream is not None
    return [fd for fd in (stream.fileno(), stream.sink()) if fd is not None]


def test_a_forked_child_may_open_a_pool_of_its_own(pool: sky.Compute) -> None:

    def own() -> object:
        with sky.Compute("local", ui="none") as mine:
            return identity(4) >> mine

    assert in_child(own) == "4"
    assert identity(1) >> pool == 1


# ---- numbers


def test_message_numbers_begin_again_after_the_last_one(pool: sky.Compute) -> None:
    identity(0) >> pool
    connection = pool.hosts[0].session.connection
    nap = sky.function(time.sleep)(1.5) > pool
    until(lambda: bool(connection.replies.pending))
    (in_use,) = connection.replies.pending
    connection._next_stream = 2**32 - 5
    futures = [identity(n) > pool for n in range(200)]
    assert [future.result(170) for future in futures] == list(range(200))
    assert nap.result(170) is None
    assert connection._next_stream < 2**20
    assert in_use < 2**20


# ---- pools that are dropped


def drop(held: list[object]) -> None:
    held.clear()
    gc.collect()


def test_a_pool_that_is_dropped_while_open_is_closed_and_said_so(hosts_of: Callable[..., list[sky.Host]]) -> None:
    pool = sky.Compute(hosts_of("local", 2), ui="none")
    pool.open()
    assert identity(1) @ pool == [1, 1]
    agents = [node.session for node in pool.hosts]
    held: list[object] = [pool]
    del pool
    with pytest.warns(ResourceWarning, match="here1, here2"):
        drop(held)
    until(lambda: all(session.has_ended for session in agents))


def test_a_call_that_runs_keeps_its_pool(hosts_of: Callable[..., list[sky.Host]]) -> None:
    pool = sky.Compute(hosts_of("local", 1), ui="none")
    pool.open()
    future = sky.function(lambda: (time.sleep(0.5), 7)[1])() > pool
    del pool
    gc.collect()
    assert future.result(170) == 7
    held: list[object] = [future]
    del future
    with pytest.warns(ResourceWarning):
        drop(held)
