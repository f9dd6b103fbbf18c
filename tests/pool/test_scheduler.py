"""The queue of solo calls, against nodes that only note what they are told: order, cancelling, lost hosts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from stage.fakes import EndsTheProgram, FakeNode, packed, result
from stage.threads import at_once

import skyfab as sky
from skyfab._util.signals import SIGNAL_GUARD
from skyfab.calls.pack import PackedCall, PackedFunction
from skyfab.pool import scheduler as module
from skyfab.pool.futures import CallFuture
from skyfab.pool.node import WorkerSpec
from skyfab.pool.scheduler import NOT_TAKEN, Scheduler
from skyfab.pool.task import Task
from skyfab.protocol import codec, messages
from skyfab.protocol.mux import SMALL

PLAN = WorkerSpec(tree="", env={}, info={})
CHANGED = WorkerSpec(tree="changed", env={}, info={})


def started(label: str, host: str) -> Callable[[BaseException | None], None]:
    return lambda error: None


def open_over(queue: Scheduler, *nodes: FakeNode) -> None:
    queue.open(nodes, lambda node, tree: PLAN if not tree else CHANGED)  # type: ignore[arg-type]


def queue_over(*nodes: FakeNode) -> Scheduler:
    queue = Scheduler(started)
    open_over(queue, *nodes)
    return queue


def task(size: int = 100_000, **options: Any) -> Task:
    return Task(packed(size, retries=options.pop("retries", 0)), **options)


# ---- hosts that are lost


@pytest.mark.parametrize("is_known", [False, True])
def test_thousands_of_waiting_calls_all_fail_with_the_last_host(is_known: bool) -> None:
    """Also if its session has not reported the loss yet. One by one: nested failures would exceed the stack."""
    node = FakeNode(1)
    queue = queue_over(node)
    tasks = [task() for _ in range(5000)]
    for each in tasks:
        queue.add(each)
    node.is_gone = True
    node.session.has_ended = is_known
    tasks[0].failed(sky.HostLost("gone", host="node1"))
    assert all(isinstance(each.future.exception(0), sky.HostLost) for each in tasks)


def test_a_call_for_a_lost_host_does_not_keep_others_waiting() -> None:
    lost, there = FakeNode(1), FakeNode(2)
    queue = queue_over(lost, there)
    lost.lost = sky.HostLost("gone", host="node1")
    pinned, free = task(on=lost), task()
    queue.add(pinned)
    queue.add(free)
    assert isinstance(pinned.future.exception(0), sky.HostLost)
    assert there.callers == [free]


def test_what_a_session_that_was_replaced_says_late_does_not_lose_the_new_one() -> None:
    node = FakeNode(1)
    queue = queue_over(node)
    late = task()
    queue.add(late)
    late.failed(sky.HostLost("said by the session before", host="node1"))
    assert node.lost is None


# ---- cancelling


def test_cancelling_a_call_that_was_moved_stops_nothing_else_on_its_new_host() -> None:
    """The number that it had on the lost host is another call's on the new one."""
    first, second = FakeNode(1), FakeNode(2)
    queue = queue_over(first)
    moved = task(retries=1)
    queue.add(moved)
    moved.sent(51)
    open_over(queue, second)
    first.lose()
    moved.failed(sky.HostLost("gone", host="node1"))
    assert second.callers == [moved], "its arguments are on their way"
    assert moved.future.cancel()
    assert second.cancelled == []
    assert not moved.is_wanted(), "and it is not sent when they are there"


def test_a_call_that_is_cancelled_in_the_moment_it_is_sent_is_stopped() -> None:
    node = FakeNode(1)
    queue = queue_over(node)
    one = task()
    queue.add(one)
    one.future.cancel()
    assert node.cancelled == []
    one.sent(7)
    assert node.cancelled == [7]


def test_cancelling_twice_is_cancelling_once() -> None:
    node = FakeNode(1)
    queue = queue_over(node)
    one = task()
    queue.add(one)
    one.sent(3)
    assert one.future.cancel()
    assert one.future.cancel()
    assert node.cancelled == [3]


def test_many_threads_may_cancel_one_future() -> None:
    for _ in range(200):
        future, told = CallFuture(), list[int]()
        future.on_cancel = lambda told=told: told.append(1)  # type: ignore[misc]
        assert at_once(CallFuture.cancel, [future] * 4) == [True] * 4
        assert told == [1]


# ---- where a call goes


class Clock:
    """Takes the place of the scheduler's `time`, and of its timers, which the test lets go off."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.timers: list[Callable[[], None]] = []
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(threading, "Timer", self._timer)

    def _timer(self, seconds: float, then: Callable[[], None]) -> Any:
        assert seconds < 1
        return SimpleNamespace(start=lambda: self.timers.append(then))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def add(queue: Scheduler, count: int, size: int = 10, **options: Any) -> list[Task]:
    tasks = [task(size, **options) for _ in range(count)]
    for each in tasks:
        queue.add(each)
    return tasks


def answer_quickly(queue: Scheduler, node: FakeNode, clock: Clock, seconds: float = 0.0001) -> None:
    """So many that the scheduler believes all calls to be that short."""
    for _ in range(60):
        (one,) = add(queue, 1, on=node)
        clock.now += seconds
        one.answered(*result(None))
    node.callers.clear()


def test_calls_spread_over_the_hosts_and_the_next_one_waits() -> None:
    nodes = [FakeNode(1), FakeNode(2)]
    queue = queue_over(*nodes)
    first, second, third = add(queue, 3)
    assert [node.callers for node in nodes] == [[first], [second]]
    second.answered(*result(2))
    assert [node.callers for node in nodes] == [[first], [second, third]]
    assert third.processes() == [(nodes[1], "solo.0", None)]
    assert third.future.node is nodes[1]  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(("seconds", "size", "ahead"), [(0.0001, 10, 32), (0.0021, 10, 4), (0.0001, 64 * 1024, 1)])
def test_small_calls_are_given_ahead_as_many_as_last_a_hundredth_of_a_second(
    clock: Clock, seconds: float, size: int, ahead: int
) -> None:
    node = FakeNode(1)
    queue = queue_over(node)
    answer_quickly(queue, node, clock, seconds)
    add(queue, 40, size=size)
    assert len(node.callers) == ahead


def test_nothing_is_given_ahead_of_a_call_that_takes_long(clock: Clock) -> None:
    node = FakeNode(1)
    queue = queue_over(node)
    answer_quickly(queue, node, clock)
    (long,) = add(queue, 1)
    clock.now += 0.02
    (behind,) = add(queue, 1)
    assert node.callers == [long]
    long.answered(*result(None))
    assert node.callers == [long, behind]


def test_a_call_that_needs_another_process_is_not_given_ahead(clock: Clock) -> None:
    node = FakeNode(1)
    queue = queue_over(node)
    answer_quickly(queue, node, clock)
    node.specs.clear()
    (first,) = add(queue, 1)
    queue.use_tree("changed")
    add(queue, 2)
    assert node.specs == [PLAN]
    first.answered(*result(None))
    assert node.specs == [PLAN, CHANGED, CHANGED]


# ---- the fast path


def run(queue: Scheduler, data: bytes = b"", buffers: Any = (), **options: Any) -> Any:
    function = PackedFunction("digest", codec.Payload(b"f"))
    return queue.run(PackedCall(function=function, arguments=codec.Payload(data, buffers), label="f", **options))


@pytest.mark.parametrize(
    "general", [{"data": bytes(SMALL + 1)}, {"buffers": [memoryview(b"x")]}, {"retries": 1}, {"stall": 3.0}]
)
def test_large_watched_and_retried_calls_are_queued(general: dict[str, Any]) -> None:
    node = FakeNode(1)
    assert run(queue_over(node), **general) is NOT_TAKEN
    assert node.callers == []


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (messages.Ended(why="unstarted"), NOT_TAKEN),
        (messages.Ended(why="died", text="killed"), sky.WorkerDied),
        (sky.HostLost("gone", host="node1"), sky.HostLost),
        (messages.Result(parts=()), "a result"),
    ],
)
def test_the_fast_path_releases_its_slot_after_any_reply(reply: Any, expected: Any) -> None:
    node = FakeNode(1)
    queue = queue_over(node)

    def answer(worker: str, plan: WorkerSpec, call: PackedCall, *, caller: Any) -> None:
        caller.sent(5)
        if isinstance(reply, Exception):
            caller.failed(reply)
        else:
            caller.answered(reply, [memoryview(codec.dumps("a result").data)])

    node.call = answer  # type: ignore[method-assign, assignment]
    if isinstance(expected, type):
        with pytest.raises(expected):
            run(queue, bytes(SMALL))
    else:
        assert run(queue, bytes(SMALL)) == expected
    assert queue._reserve() is not None
    assert node.cancelled == []


def test_a_host_that_is_lost_before_a_call_is_sent_leaves_its_slot_free() -> None:
    node = FakeNode(1)
    node.is_gone = True
    queue = queue_over(node)
    with pytest.raises(sky.HostLost):
        run(queue)
    assert queue._reserve() is not None


def test_an_interrupted_call_is_cancelled_and_keeps_its_slot_until_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(wait: object) -> None:
        (caller,) = node.callers
        caller.sent(5)
        raise KeyboardInterrupt

    monkeypatch.setattr(SIGNAL_GUARD, "acquire", interrupted)
    node = FakeNode(1)
    queue = queue_over(node)
    with pytest.raises(KeyboardInterrupt):
        run(queue)
    (caller,) = node.callers
    assert node.cancelled == [5]
    assert queue._reserve() is None
    caller.answered(messages.Ended(why="cancelled"), [])
    assert queue._reserve() is not None


def test_a_reserved_slot_is_nobody_elses_until_it_is_released(clock: Clock) -> None:
    node = FakeNode(1)
    queue = queue_over(node)
    answer_quickly(queue, node, clock)
    slot = queue._reserve()
    assert slot is not None
    assert queue._reserve() is None
    (waiting,) = add(queue, 1)
    assert node.callers == []
    queue._release(slot)
    assert node.callers == [waiting]


# ---- calls that come back


def ended(why: str) -> messages.Ended:
    return messages.Ended(why=why, text="", exitcode=None, traceback="")


@pytest.mark.parametrize("why", ["unstarted", "unassigned", "unstored"])
def test_a_call_that_did_not_begin_is_made_again_before_others(why: str) -> None:
    node = FakeNode(1)
    queue = queue_over(node)
    back, behind = add(queue, 2)
    back.sent(7)
    back.answered(ended(why), [])
    assert node.callers == [back, back]
    assert back.stream == 0
    back.answered(*result("at last"))
    assert back.future.result(0) == "at last"
    assert node.callers == [back, back, behind]


def test_a_call_whose_worker_never_starts_fails_in_the_end() -> None:
    node = FakeNode(1)
    (one,) = add(queue_over(node), 1)
    for _ in range(100):
        assert not one.future.done()
        one.answered(ended("unstarted"), [])
    assert isinstance(one.future.exception(0), sky.WorkerDied)
    assert len(node.callers) == 100


def test_a_call_that_was_cancelled_meanwhile_is_not_made_again() -> None:
    node = FakeNode(1)
    (one,) = add(queue_over(node), 1)
    one.future.cancel()
    one.answered(ended("unstarted"), [])
    assert node.callers == [one]


def test_what_was_given_ahead_behind_a_long_call_is_taken_back_for_an_idle_worker(clock: Clock) -> None:
    nodes = [FakeNode(1), FakeNode(2)]
    queue = queue_over(*nodes)
    for node in nodes:
        answer_quickly(queue, node, clock)
    clock.timers.clear()
    queue._looking = False
    (short,) = add(queue, 1, on=nodes[1])
    long, second = add(queue, 2)
    add(queue, 1, on=nodes[0])
    for stream, each in enumerate((long, second), 1):
        each.sent(stream)
    clock.now += 0.001
    short.answered(*result(None))
    assert len(clock.timers) == 1
    clock.now += 0.02
    clock.timers.pop()()
    assert nodes[0].unassigned == [2], "not the one that runs, nor one that is not sent yet"
    assert nodes[1].unassigned == []
    assert len(clock.timers) == 1, "and it looks again"
    second.answered(ended("unassigned"), [])
    assert nodes[1].callers == [short, second]
    clock.timers.pop()()
    assert clock.timers == [], "nobody is idle any more"


# ---- failures


def test_a_call_with_retries_moves_to_another_host_so_often() -> None:
    retries = 2
    nodes = [FakeNode(number) for number in range(4)]
    told: list[tuple[str, type]] = []
    queue = Scheduler(lambda label, host: lambda error: told.append((host, type(error))))
    open_over(queue, *nodes)
    (one,) = add(queue, 1, retries=retries)
    for node in nodes[: retries + 1]:
        assert not one.future.done()
        assert node.callers == [one]
        node.lose()
        one.failed(sky.HostLost("gone", host=node.name))
    assert told == [(node.name, sky.HostLost) for node in nodes[: retries + 1]]
    assert isinstance(one.future.exception(0), sky.HostLost)


def test_a_call_for_a_host_that_is_lost_fails_with_its_error() -> None:
    nodes = [FakeNode(1), FakeNode(2)]
    nodes[0].lost = sky.HostLost("the reason", host="node1")
    (one,) = add(queue_over(*nodes), 1, on=nodes[0])
    with pytest.raises(sky.HostLost, match="the reason"):
        one.future.result(0)
    assert nodes[0].lost.__traceback__ is None, "it keeps no frames of the program"
    nodes[1].lost = sky.HostLost("another", host="node2")
    (two,) = add(queue_over(*nodes), 1)
    assert "every host" in str(two.future.exception(0))


def test_the_end_of_a_call_is_told_before_who_waits_goes_on() -> None:
    seen: list[tuple[BaseException | None, bool]] = []
    node = FakeNode(1)
    queue = Scheduler(lambda label, host: lambda error: seen.append((error, one.future.done())))
    open_over(queue, node)
    (one,) = add(queue, 1)
    one.answered(*result(1))
    assert seen == [(None, False)]
    assert one.future.on_cancel is None


def test_calls_that_wait_when_the_pool_closes_fail_and_those_that_run_do_not() -> None:
    node = FakeNode(1)
    queue = queue_over(node)
    one, two = add(queue, 2)
    queue.fail_all()
    assert isinstance(two.future.exception(0), sky.CallCancelled)
    assert not one.future.done()


def test_untrusted_hosts_return_plain_data_only() -> None:
    node = FakeNode(1)
    queue = Scheduler(started, untrusted=True)
    open_over(queue, node)
    (one,) = add(queue, 1)
    one.answered(*result(EndsTheProgram()))
    assert isinstance(one.future.exception(0), sky.UntrustedResult)
