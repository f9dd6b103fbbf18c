"""The fast path of a small call changes nothing but its time, whatever happens to it, its host or its caller."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from stage.remote import linger, wait_for
from stage.spot import Spot, until
from stage.threads import at_once, begin

import skyfab as sky
from skyfab.pool.task import Task
from skyfab.protocol.mux import ACK_FRAMES, SMALL
from skyfab.ui.events import CallEnded, CallStarted, Event

pytestmark = pytest.mark.lab

MB = 1 << 20


@sky.function
def identity(value: Any) -> Any:
    return value


@sky.function
def process() -> int:
    return os.getpid()


@sky.function
def stay(path: str) -> None:
    linger(path)


@sky.function
def wait_at(path: str, value: Any = None) -> Any:
    wait_for(path)
    return value


@pytest.fixture(scope="module")
def one(hosts_of: Callable[..., list[sky.Host]]) -> Iterator[sky.Compute]:
    """One host with one slot, over a real connection."""
    with sky.Compute(hosts_of("openssh", 1), ui="none") as compute:
        yield compute


@pytest.fixture
def queued(one: sky.Compute, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The labels of calls that went the usual way."""
    found: list[str] = []
    add = one._scheduler.add

    def noted(task: Task) -> None:
        found.append(task.call.label)
        add(task)

    monkeypatch.setattr(one._scheduler, "add", noted)
    return found


@pytest.fixture
def heard(one: sky.Compute) -> Iterator[list[Event]]:
    """What happens in the pool during the test."""
    found: list[Event] = []
    unsubscribe = one.events.subscribe(found.append)
    yield found
    unsubscribe()


def interrupt_when(condition: Callable[[], Any]) -> Future[None]:
    """Presses Ctrl-C once a condition holds."""

    def press() -> None:
        condition()
        os.kill(os.getpid(), signal.SIGINT)

    return begin(press)


def make(number: int) -> Any:
    """A function like no other."""
    return sky.function(lambda: number)


# ---- which calls take it


def test_a_small_call_that_waits_for_nobody_is_not_queued(one: sky.Compute, queued: list[str]) -> None:
    assert [identity(n) >> one for n in range(20)] == list(range(20))
    assert identity(b"x" * (SMALL - 100)) >> one == b"x" * (SMALL - 100)
    assert queued == []


def test_a_call_that_finds_no_slot_free_waits_for_one(one: sky.Compute, queued: list[str], spot: Spot) -> None:
    first = begin(lambda: wait_at(spot / "go", 1) >> one)
    until(lambda: one._scheduler._slots[0].tasks, "the first call in its slot")
    second = begin(lambda: identity(2) >> one)
    until(lambda: queued == ["identity"], "the second call in the queue")
    assert not second.done()
    spot.leave("go")
    assert (first.result(170), second.result(170)) == (1, 2)


# ---- many at once


def test_calls_of_every_kind_from_many_threads_do_not_mix(open_pool: Callable[..., sky.Compute]) -> None:
    count = 2
    pool = open_pool("fabric", count=count, host={"slots": 2})

    def fail(n: int) -> None:
        raise ValueError(n)

    def failing(n: int) -> Any:
        with pytest.raises(ValueError) as caught:
            sky.function(fail)(n) >> pool
        return caught.value.args

    kinds: list[tuple[Callable[[int], Any], Callable[[int], Any]]] = [
        (lambda n: identity(n) >> pool, lambda n: n),
        (lambda n: (identity(n) > pool).result(170), lambda n: n),
        (lambda n: identity(n) @ pool, lambda n: [n] * count),
        (lambda n: pool.map(lambda x: x + 1, range(n)), lambda n: list(range(1, n + 1))),
        (lambda n: (identity(n) & identity(-n)) >> pool, lambda n: (n, -n)),
        (lambda n: identity("x" * (n * 5000)) >> pool, lambda n: "x" * (n * 5000)),
        (failing, lambda n: (n,)),
    ]

    def work(thread: int) -> list[Any]:
        found = []
        for n in range(14):
            found.append(kinds[(n + thread) % len(kinds)][0](n))
            found.append(identity((thread, n)) >> pool)
        return found

    def expected(thread: int) -> list[Any]:
        found: list[Any] = []
        for n in range(14):
            found += [kinds[(n + thread) % len(kinds)][1](n), (thread, n)]
        return found

    assert at_once(work, range(8)) == [expected(thread) for thread in range(8)]
    assert all(not slot.tasks for slot in pool._scheduler._slots)


def test_nothing_is_kept_of_thousands_of_calls(one: sky.Compute) -> None:
    """Acknowledgements come both ways, and no call leaves anything behind."""
    talk = one.hosts[0].session
    for n in range(1000):
        assert identity(n) >> one == n
        assert len(talk.connection._mux._unacked) <= 2 * ACK_FRAMES
    assert talk.connection._mux._owed_frames < ACK_FRAMES
    assert talk.connection.replies.pending == {}
    assert talk.connection._mux._send_queue.streams == {}


def test_more_functions_than_a_host_remembers(one: sky.Compute) -> None:
    """Those that were forgotten are taught again; those that are used all the time stay."""
    functions = [make(n) for n in range(300)]
    for _ in range(2):
        for n, function in enumerate(functions):
            assert [function() >> one, identity(n) >> one, function() >> one] == [n, n, n]
    assert functions[0]() >> one == 0


def test_a_function_is_not_forgotten_while_a_call_of_it_waits(one: sky.Compute, spot: Spot) -> None:
    first = one.submit(wait_at(spot / "go"), on="all")
    second = one.submit(make(-1)(), on="all")
    for n in range(1000, 1300):
        assert make(n)() >> one == n
    spot.leave("go")
    first.result(170)
    assert second.result(170) == [-1]


# ---- callbacks


def test_a_callback_may_run_a_call_while_the_slot_is_taken(open_pool: Callable[..., sky.Compute], spot: Spot) -> None:
    pool = open_pool("local")
    for _ in range(3):
        sky.function(lambda: time.sleep(0.05))() >> pool
    done: Future[int] = Future()
    first = wait_at(spot / "go", 1) > pool
    second = sky.function(lambda: time.sleep(0.05))() > pool
    first.add_done_callback(lambda future: done.set_result(identity(future.result()) >> pool))
    spot.leave("go")
    assert done.result(3) == 1
    second.result(170)


# ---- Ctrl-C


def test_ctrl_c_stops_the_call_on_its_host_and_the_pool_goes_on(
    one: sky.Compute, spot: Spot, runs_on: Callable[[str, int], bool], heard: list[Event]
) -> None:
    for round_ in ("first", "second"):
        pressed = interrupt_when(lambda: spot.wait(round_))  # noqa: B023
        with pytest.raises(KeyboardInterrupt):
            stay(spot / round_) >> one
        pressed.result(170)
        ((machine, pid),) = spot.notes(round_).items()
        until(lambda: not runs_on(machine, int(pid)), "the end of the call's process")  # noqa: B023
        assert identity(round_) >> one == round_
    ended = [event for event in heard if isinstance(event, CallEnded)]
    assert [(event.function, event.error is None) for event in ended] == [("stay", False), ("identity", True)] * 2
    assert {event.call for event in heard if isinstance(event, CallStarted)} == {event.call for event in ended}


def test_ctrl_c_does_not_wait_for_a_host_that_is_silent(open_pool: Callable[..., sky.Compute], spot: Spot) -> None:
    pool = open_pool("local")
    assert identity(1) >> pool == 1
    agent = pool.hosts[0].agent.pid

    def fall_silent() -> None:
        spot.wait("pid")
        os.kill(agent, signal.SIGSTOP)

    pressed = interrupt_when(fall_silent)
    try:
        with pytest.raises(KeyboardInterrupt):
            stay(spot / "pid") >> pool
        pressed.result(170)
    finally:
        os.kill(agent, signal.SIGCONT)
    assert identity(2) >> pool == 2


def test_an_interrupt_before_the_call_has_left_does_not_take_its_slot(one: sky.Compute) -> None:
    pressed: list[Event] = []

    def press(event: Event) -> None:
        if isinstance(event, CallStarted) and not pressed:
            pressed.append(event)
            raise KeyboardInterrupt

    unsubscribe = one.events.subscribe(press)
    with pytest.raises(KeyboardInterrupt):
        identity(1) >> one
    unsubscribe()
    try:
        assert (identity(2) > one).result(3) == 2
    finally:
        one._scheduler._slots[0].tasks.clear()  # the tests after this one want it


# ---- what comes back


def test_results_of_any_size(one: sky.Compute) -> None:
    @sky.function
    def some(size: int) -> bytes:
        return bytes(n % 251 for n in range(1000)) * (size // 1000) + b"." * (size % 1000)

    pattern = bytes(n % 251 for n in range(1000))
    sizes = [0, 1, *range(SMALL - 80, SMALL + 20, 7), 64 * 1024, 3 * MB]
    for size in (*sizes, *reversed(sizes)):
        assert some(size) >> one == pattern * (size // 1000) + b"." * (size % 1000)
        assert identity("small") >> one == "small"
