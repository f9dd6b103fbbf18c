"""One broadcast, its queue and its retries, against members that only note what they are told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from stage.fakes import FakeNode
from stage.spot import until

import skyfab as sky
from skyfab.calls.pack import PackedCall, PackedFunction
from skyfab.errors import RemoteTraceback
from skyfab.plugins.base import Elastic
from skyfab.pool.broadcast import Broadcast, Broadcasts, may_go_on, retry
from skyfab.pool.futures import CallFuture
from skyfab.protocol import codec, messages
from skyfab.ui.events import Events

GONE = sky.HostLost("gone", host="node1")


class Stage:
    """A gang of so many ranks, each on a host of its own, and one call on it. Timers go off when the test says so."""

    def __init__(self, ranks: int, **options: Any) -> None:
        self.nodes = [FakeNode(rank) for rank in range(ranks)]
        members = [
            SimpleNamespace(node=node, worker=f"gang1.{rank}", spec=None, rank=rank)
            for rank, node in enumerate(self.nodes)
        ]
        self.gang: Any = SimpleNamespace(members=members, broken=False)
        self.told: list[tuple[object, bool]] = []
        self.ended: list[bool] = []
        self.call = Broadcast(packed(), lambda call: self.ended.append(call.future.done()), **options)

    def begin(self) -> None:
        self.call.begin(self.gang, lambda error: self.told.append((error, self.call.future.done())))

    def caller(self, rank: int) -> Any:
        return self.nodes[rank].callers[0]

    def answer(self, rank: int, value: object) -> None:
        payload = codec.dumps(value)
        self.caller(rank).answered(messages.Result(parts=[len(payload.data)]), [memoryview(payload.data)])

    def end(self, rank: int, why: str) -> None:
        self.caller(rank).answered(messages.Ended(why=why), [])


def packed() -> PackedCall:
    return PackedCall(function=PackedFunction("digest", codec.Payload(b"")), arguments=codec.Payload(b""), label="f")


@pytest.fixture(autouse=True)
def timers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The timers that run."""
    running: list[Any] = []

    def timer(seconds: float, then: Callable[[], None]) -> Any:
        made = SimpleNamespace(then=then)
        made.start = lambda: running.append(made)
        made.cancel = lambda: running.remove(made)
        return made

    monkeypatch.setattr(threading, "Timer", timer)
    return running


# ---- one broadcast


def test_the_result_is_that_of_each_rank_in_order() -> None:
    stage = Stage(3)
    assert stage.call.processes() == []
    assert not stage.call.is_sent
    stage.begin()
    assert stage.call.processes() == [(node, f"gang1.{rank}", rank) for rank, node in enumerate(stage.nodes)]
    for rank in (2, 0, 1):
        assert not stage.call.future.done()
        stage.answer(rank, f"rank {rank}")
    assert stage.call.future.result(0) == ["rank 0", "rank 1", "rank 2"]
    assert stage.ended == [False], "the next one begins before who waits goes on"
    assert stage.told == [(None, False)]
    assert stage.call.future.on_cancel is None
    assert not stage.gang.broken


@pytest.mark.parametrize(("ranks", "store"), [(1, "repeated"), (2, "all")])
def test_arguments_are_kept_on_hosts_where_several_ranks_need_them(ranks: int, store: str) -> None:
    stage = Stage(ranks)
    stage.begin()
    assert stage.nodes[0].options == [{"store": store}]


def test_it_is_sent_when_every_rank_has_it() -> None:
    stage = Stage(2)
    stage.begin()
    stage.caller(0).sent(1)
    assert not stage.call.is_sent
    stage.caller(1).sent(3)
    assert stage.call.is_sent


def test_a_rank_that_fails_is_reported_with_what_the_others_returned() -> None:
    stage = Stage(2)
    stage.begin()
    stage.answer(0, "fine")
    stage.caller(1).failed(ValueError("only here"))
    error = stage.call.future.exception(0)
    assert isinstance(error, sky.BroadcastError)
    assert "1 of 2 ranks" in str(error)
    assert [str(each) for each in error.exceptions] == ["only here"]
    assert error.results[0] == "fine"
    assert stage.told == [(error, False)]
    assert stage.ended == [False]


def test_the_other_ranks_are_stopped_some_time_after_one_has_failed(timers: list[Any]) -> None:
    stage = Stage(3)
    stage.begin()
    for rank in range(3):
        stage.caller(rank).sent(rank + 1)
    stage.caller(1).failed(ValueError("first"))
    stage.caller(1).failed(ValueError("said twice"))
    assert [node.cancelled for node in stage.nodes] == [[], [], []]
    assert len(timers) == 1
    timers[0].then()
    assert [node.cancelled for node in stage.nodes] == [[1], [], [3]]
    assert stage.gang.broken
    stage.end(0, "cancelled")
    assert len(timers) == 1, "the time runs from the first failure"
    stage.end(2, "cancelled")
    assert timers == []
    error = stage.call.future.exception(0)
    assert isinstance(error, sky.BroadcastError)
    assert [str(one) for one in error.exceptions] == ["first"]
    assert [type(one) for one in error.results] == [sky.CallCancelled, ValueError, sky.CallCancelled]


def test_nothing_is_to_be_stopped_after_the_last_rank(timers: list[Any]) -> None:
    stage = Stage(1)
    stage.begin()
    stage.caller(0).failed(ValueError("the only one"))
    assert timers == []


def test_a_rank_that_cannot_be_sent_to_has_failed() -> None:
    stage = Stage(2)
    stage.nodes[1].is_gone = True
    stage.begin()
    stage.answer(0, 1)
    error = stage.call.future.exception(0)
    assert isinstance(error, sky.BroadcastError)
    assert [type(one) for one in error.exceptions] == [sky.HostLost]
    assert stage.gang.broken


@pytest.mark.parametrize(
    ("why", "broken"), [("unpicklable", False), ("exit", False), ("died", True), ("timeout", True), ("cancelled", True)]
)
def test_a_gang_whose_process_has_ended_or_will_is_not_used_again(why: str, broken: bool) -> None:
    stage = Stage(2)
    stage.begin()
    stage.end(0, why)
    assert stage.gang.broken is broken


def test_a_gang_is_used_again_after_an_exception() -> None:
    stage = Stage(1)
    stage.begin()
    stage.caller(0).failed(ValueError("no"))
    assert not stage.gang.broken
    other = Stage(1)
    other.begin()
    other.caller(0).failed(GONE)
    assert other.gang.broken


def test_an_elastic_broadcast_may_lose_some_hosts_but_not_the_first() -> None:
    stage = Stage(3, min_hosts=2)
    stage.begin()
    stage.caller(1).failed(GONE)
    assert stage.gang.broken, "the next one needs a new gang"
    stage.answer(0, "a")
    stage.answer(2, "c")
    assert stage.call.future.result(0) == ["a", None, "c"]
    for lost in ([0], [1, 2]):
        stage = Stage(3, min_hosts=2)
        stage.begin()
        for rank in lost:
            stage.caller(rank).failed(GONE)
        for rank in {0, 1, 2} - set(lost):
            stage.answer(rank, 1)
        error = stage.call.future.exception(0)
        assert isinstance(error, sky.BroadcastError)
        assert len(error.exceptions) == 1


def test_an_elastic_broadcast_may_not_fail_otherwise() -> None:
    stage = Stage(2, min_hosts=1)
    stage.begin()
    stage.caller(1).failed(ValueError("no"))
    stage.answer(0, 1)
    assert isinstance(stage.call.future.exception(0), sky.BroadcastError)


def test_cancelling_stops_the_ranks_that_have_it_and_keeps_it_from_the_others() -> None:
    stage = Stage(4)
    stage.begin()
    for rank in range(3):
        stage.caller(rank).sent(rank + 1)
    stage.answer(0, "done")
    stage.nodes[1].is_gone = True
    assert stage.caller(3).is_wanted()
    assert stage.call.future.cancel()
    assert [node.cancelled for node in stage.nodes] == [[], [], [3], []]
    assert not stage.caller(3).is_wanted()
    stage.caller(3).sent(4)
    assert stage.nodes[3].cancelled == [4], "it was sent in that moment"


def test_after_the_others_are_stopped_it_is_not_sent_to_more(timers: list[Any]) -> None:
    stage = Stage(2)
    stage.begin()
    stage.caller(0).failed(ValueError("no"))
    assert stage.call.is_wanted
    timers[0].then()
    assert not stage.call.is_wanted


def test_what_is_abandoned_fails_and_goes_on() -> None:
    stage = Stage(1)
    stage.begin()
    stage.caller(0).sent(1)
    error = sky.CallCancelled("it was detached")
    stage.call.abandon(error)
    assert stage.call.future.exception(0) is error
    assert stage.nodes[0].cancelled == []
    stage.answer(0, "late")
    assert stage.told == [(error, False)]
    assert stage.call.future.on_cancel is None


def exit_now() -> None:
    raise SystemExit(3)


class EndsTheProgram:
    def __reduce__(self) -> tuple[Any, ...]:
        return exit_now, ()


def test_a_result_that_ends_the_program_when_it_is_unpickled_is_a_failure_of_its_rank() -> None:
    stage = Stage(1)
    stage.begin()
    with pytest.raises(SystemExit):
        stage.answer(0, EndsTheProgram())
    error = stage.call.future.exception(0)
    assert isinstance(error, sky.BroadcastError)
    assert isinstance(error.exceptions[0], sky.NotPicklable)


def test_untrusted_hosts_return_plain_data_only() -> None:
    stage = Stage(1, untrusted=True)
    stage.begin()
    stage.answer(0, EndsTheProgram())
    error = stage.call.future.exception(0)
    assert isinstance(error, sky.BroadcastError)
    assert isinstance(error.exceptions[0], sky.UntrustedResult)


def test_equal_tracebacks_are_shown_once() -> None:
    stage = Stage(4)
    stage.begin()
    for rank, text in enumerate(("same", "same", "other", "same")):
        kind = "KeyError" if rank == 3 else "ValueError"
        payload = codec.dumps({"KeyError": KeyError, "ValueError": ValueError}[kind]("no"))
        raised = messages.Raised(kind=kind, text="no", traceback=text, parts=[len(payload.data)])
        stage.caller(rank).answered(raised, [memoryview(payload.data)])
    error = stage.call.future.exception(0)
    assert isinstance(error, sky.BroadcastError)
    causes = [each.__cause__ for each in error.exceptions]
    assert all(isinstance(cause, RemoteTraceback) for cause in causes)
    assert [cause.text for cause in causes] == ["same", "[the traceback is that of node0[0]]", "other", "same"]  # type: ignore[union-attr]


# ---- the queue


def new_queue() -> Broadcasts:
    images: Any = SimpleNamespace(plugins=(), variables=None)
    return Broadcasts(images, 1, "job", Events(), untrusted=False)


def add(queue: Broadcasts, start: Callable[[Broadcast], None]) -> Broadcast:
    broadcast = Broadcast(packed(), queue._ended)
    queue.add(broadcast, lambda: start(broadcast))
    return broadcast


def test_broadcasts_run_one_after_another() -> None:
    queue, begun = new_queue(), list[Broadcast]()
    first, second, third = (add(queue, begun.append) for _ in range(3))
    assert begun == [first]
    first.fail(GONE)
    until(lambda: len(begun) == 2)
    queue._ended(first)  # said twice
    second.fail(GONE)
    until(lambda: len(begun) == 3)
    assert begun == [first, second, third]
    third.fail(GONE)
    assert add(queue, begun.append) in begun


def test_one_that_was_cancelled_while_it_waited_does_not_begin() -> None:
    queue, begun = new_queue(), list[Broadcast]()
    first, second, third = (add(queue, begun.append) for _ in range(3))
    assert second.future.cancel()
    first.fail(GONE)
    until(lambda: len(begun) == 2)
    assert begun == [first, third]


def test_one_that_was_cancelled_as_its_turn_came_makes_room_for_the_next() -> None:
    queue, begun = new_queue(), list[Broadcast]()
    running = add(queue, begun.append)
    gone = Broadcast(packed(), queue._ended)
    gone.future.cancel()
    running.fail(GONE)
    queue._active = gone
    after = add(queue, begun.append)
    queue._begin(gone, lambda: begun.append(gone))
    until(lambda: len(begun) == 2)
    assert begun == [running, after]


def test_one_that_cannot_begin_fails_and_the_next_one_begins() -> None:
    queue, begun = new_queue(), list[Broadcast]()

    def fail(call: Broadcast) -> None:
        raise GONE

    assert add(queue, fail).future.exception(0) is GONE
    after = add(queue, begun.append)
    assert begun == [after]


@pytest.mark.parametrize("has_begun", [False, True])
def test_ctrl_c_while_a_broadcast_begins_cancels_it(has_begun: bool) -> None:
    queue, calls = new_queue(), list[Broadcast]()
    stage = Stage(1)

    def interrupted(call: Broadcast) -> None:
        calls.append(call)
        if has_begun:
            call.begin(stage.gang, lambda error: None)
            stage.caller(0).sent(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        add(queue, interrupted)
    assert calls[0].future.done()
    assert calls[0].future.cancelled() is has_begun
    assert stage.nodes[0].cancelled == [1] * has_begun


def test_at_work_is_what_every_rank_has_and_nobody_stops() -> None:
    queue, stage = new_queue(), Stage(1)
    assert queue.at_work is None
    call = add(queue, lambda call: call.begin(stage.gang, lambda error: None))
    assert queue.at_work is None
    stage.caller(0).sent(1)
    assert queue.at_work is call
    stage.gang.broken = True
    assert queue.at_work is None
    stage.gang.broken = False
    call.future.cancel()
    stage.gang.broken = False
    assert queue.at_work is None


def test_a_broadcast_that_comes_while_the_pool_closes_does_not_hang_nor_hold_up_later_ones() -> None:
    queue, begun = new_queue(), list[Broadcast]()
    running = add(queue, begun.append)
    waiting = add(queue, begun.append)
    queue.close()
    late = add(queue, begun.append)
    for call in (waiting, late):
        assert isinstance(call.future.exception(0), sky.CallCancelled)
    running.fail(sky.HostLost("the pool is closed"))
    queue.open()
    after = add(queue, begun.append)
    assert begun == [running, after]


# ---- retries


def test_a_call_is_started_again_as_long_as_it_is_worth_it() -> None:
    numbers: list[int] = []

    def start(number: int) -> CallFuture:
        numbers.append(number)
        inner = CallFuture()
        inner.settle(None, ValueError(f"attempt {number}"))
        return inner

    outer = retry(start, lambda error, number: number < 2)
    assert str(outer.exception(30)) == "attempt 2"
    assert numbers == [0, 1, 2]


def test_the_result_of_an_attempt_is_finished() -> None:
    inner = CallFuture()
    outer = retry(lambda number: inner, lambda error, number: True, finish=lambda result: result + 1)
    inner.settle(1)
    assert outer.result(0) == 2


def test_a_result_that_cannot_be_finished_breaks_the_protocol() -> None:
    inner = CallFuture()
    outer = retry(lambda number: inner, lambda error, number: True, finish=lambda result: result.missing)
    inner.settle(1)
    assert isinstance(outer.exception(0), sky.ProtocolError)


def test_what_was_detached_is_not_started_again() -> None:
    inner = CallFuture()
    outer = retry(lambda number: inner, lambda error, number: pytest.fail("asked"))
    inner.settle(None, sky.CallCancelled("it was detached"))
    assert isinstance(outer.exception(0), sky.CallCancelled)


def test_an_attempt_that_cannot_be_started_is_the_last() -> None:
    def start(number: int) -> CallFuture:
        raise GONE

    assert retry(start, lambda error, number: True).exception(0) is GONE


def test_cancelling_cancels_the_attempt_and_the_other_way_round() -> None:
    inner = CallFuture()
    inner.pool, inner.node = object(), FakeNode()  # type: ignore[assignment]
    outer = retry(lambda number: inner, lambda error, number: True)
    assert outer.pool is inner.pool
    assert outer.node is inner.node
    assert outer.cancel()
    assert inner.cancelled()
    inner = CallFuture()
    outer = retry(lambda number: inner, lambda error, number: True)
    inner.cancel()
    assert outer.cancelled()


def test_what_is_cancelled_between_two_attempts_is_cancelled_in_the_next() -> None:
    second = CallFuture()
    futures = [CallFuture(), second]
    first = futures[0]

    def start(number: int) -> CallFuture:
        if number:
            outer.cancel()
        return futures[number]

    outer = retry(start, lambda error, number: True)
    first.settle(None, GONE)
    until(second.cancelled)


def test_what_was_cancelled_is_not_started_again() -> None:
    inner = CallFuture()
    outer = retry(lambda number: inner, lambda error, number: pytest.fail("asked"))
    outer.on_cancel = None  # the attempt ends by itself
    outer.cancel()
    inner.settle(None, GONE)
    assert outer.cancelled()


@pytest.mark.parametrize(
    ("errors", "number", "goes_on"),
    [
        *(([ValueError()], 0, True), ([ValueError()], 1, False)),
        *(([GONE], 1, True), ([ValueError(), GONE], 3, True), ([GONE], 4, False)),
    ],
)
def test_a_lost_host_counts_less_than_another_failure(errors: list[Exception], number: int, goes_on: bool) -> None:
    error = sky.BroadcastError("f failed", errors, [])
    elastic = Elastic(min_hosts=1, max_hosts=2, max_restarts=3)
    assert may_go_on(error, number, elastic, retries=1) is goes_on
    assert not may_go_on(GONE, 1, elastic, retries=1), "only what ranks have said"
