"""Broadcasts, their queue, retries and gangs, on nodes that only record what they are asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from stage.fakes import EndsTheProgram, FakeNode, packed, result
from stage.spot import until

import skyfab as sky
from skyfab.plugins.base import Elastic
from skyfab.pool.broadcast import Broadcast
from skyfab.pool.broadcasts import Broadcasts
from skyfab.pool.rendezvous import RendezvousFinder
from skyfab.protocol import messages
from skyfab.session.timing import Timing
from skyfab.ui.events import Events

GONE = sky.HostLost("gone", host="node1")


class Stage:
    """A gang of so many ranks, each on a host of its own, and one call on it. Timers go off when the test says so."""

    def __init__(self, ranks: int, *, untrusted: bool = False, **options: Any) -> None:
        self.nodes = [FakeNode(rank) for rank in range(ranks)]
        members = [
            SimpleNamespace(node=node, worker=f"gang1.{rank}", spec=None, rank=rank)
            for rank, node in enumerate(self.nodes)
        ]
        self.gang: Any = SimpleNamespace(members=members, broken=False, job="job")
        self.told: list[tuple[object, bool]] = []
        self.call = Broadcast(packed(), untrusted=untrusted, **options)

    def begin(self) -> None:
        self.call.begin(self.gang, lambda error: self.told.append((error, self.call.future.done())))

    def caller(self, rank: int) -> Any:
        return self.nodes[rank].callers[0]

    def answer(self, rank: int, value: object) -> None:
        self.caller(rank).answered(*result(value))

    def end(self, rank: int, why: str) -> None:
        self.caller(rank).answered(messages.Ended(why=why), [])


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
    assert stage.told == [(None, False)]
    assert stage.call.future.on_cancel is None
    assert not stage.gang.broken


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


def refuse() -> None:
    raise RuntimeError("can't start new thread")


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


def test_an_elastic_broadcast_may_lose_some_hosts_but_not_the_first() -> None:
    stage = Stage(3, min_hosts=2)
    stage.begin()
    stage.caller(1).failed(GONE)
    assert stage.gang.broken, "the next one needs a new gang"
    stage.answer(0, [(1, "b"), (0, "a")])
    stage.answer(2, [(2, "c")])
    assert stage.call.future.result(0) == ["a", "b", "c"]
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


def test_results_that_no_elastic_agent_sends_break_the_protocol() -> None:
    stage = Stage(1, min_hosts=1)
    stage.begin()
    stage.answer(0, 5)
    assert isinstance(stage.call.future.exception(0), sky.ProtocolError)


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


def test_a_generator_that_is_closed_while_it_is_being_sent_is_closed_there() -> None:
    stage = Stage(1)
    stage.call = Broadcast(packed(yields=True), untrusted=False)
    iterators = stage.call.iterators()
    stage.begin()
    [values] = iterators.result(0)
    values.close()
    stage.call.conversations[0].begin(stage.nodes[0], "gang1.0", 1)  # type: ignore[arg-type]
    assert [message.what for message in stage.nodes[0].session.sent] == ["close"]
    stage.answer(0, None)


def test_untrusted_hosts_return_plain_data_only() -> None:
    stage = Stage(1, untrusted=True)
    stage.begin()
    stage.answer(0, EndsTheProgram())
    error = stage.call.future.exception(0)
    assert isinstance(error, sky.BroadcastError)
    assert isinstance(error.exceptions[0], sky.UntrustedResult)


# ---- the queue


class Pool:
    """The broadcasts of a pool of two hosts, with one rank each unless `ranks` says otherwise."""

    def __init__(self, ranks: int = 1, elastic: Elastic | None = None, lease: float = 60) -> None:
        timing = Timing(lease=lease, heartbeat_timeout=0.3)
        plugins = [SimpleNamespace(elastic=elastic, network="unused")] if elastic else []
        images: Any = SimpleNamespace(plugins=plugins, variables=lambda host: {"OF": host.name})
        self.queue = Broadcasts(images, ranks, "pool", timing, Events(), untrusted=False)
        self.nodes: list[Any] = [FakeNode(0), FakeNode(1)]

    def submit(self, label: str = "f", **options: Any) -> Any:
        return self.queue.submit(packed(label=label, **options), self.nodes)

    @property
    def begun(self) -> list[str]:
        """The labels of the calls that the first host was sent."""
        return [caller._broadcast.call.label for caller in self.nodes[0].callers]

    def wait_for(self, *labels: str) -> None:
        until(lambda: self.begun == list(labels) and len(self.nodes[1].callers) == len(labels))

    def fail(self, error: Exception = GONE) -> None:
        """Both ranks of the last broadcast fail."""
        for node in self.nodes:
            node.callers[-1].failed(error)


@pytest.fixture(autouse=True)
def fake_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    def arrange(_: RendezvousFinder, nodes: Any) -> Any:
        if stopped := next((node.stops for node in nodes if hasattr(node, "stops")), None):
            raise stopped
        addresses = [SimpleNamespace(address=f"192.0.2.{node.index}", interface="") for node in nodes]
        return SimpleNamespace(port=4242, addresses=tuple(addresses))

    monkeypatch.setattr(RendezvousFinder, "arrange", arrange)


def test_broadcasts_run_one_after_another() -> None:
    pool = Pool()
    for label in ("first", "second", "third"):
        pool.submit(label)
    assert pool.begun == ["first"]
    pool.fail()
    pool.wait_for("first", "second")
    pool.fail()
    pool.wait_for("first", "second", "third")
    assert not pool.queue.is_idle
    pool.fail()
    assert pool.queue.is_idle
    pool.submit("fourth")
    assert pool.begun[-1] == "fourth"


@pytest.mark.parametrize("retries", [0, 1])
def test_those_that_wait_fail_if_there_is_no_thread_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch, retries: int
) -> None:
    pool = Pool()
    futures = [pool.submit(label, retries=retries) for label in ("first", "second", "third")]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: refuse())
        pool.fail()
    first, *others = [future.exception(0) for future in futures]
    assert isinstance(first, RuntimeError if retries else sky.BroadcastError)
    assert [type(error) for error in others] == [RuntimeError] * 2
    assert pool.queue.is_idle
    pool.submit("fourth")
    assert pool.begun == ["first", "fourth"]


def test_one_that_cannot_begin_fails_and_the_next_one_begins() -> None:
    pool = Pool()
    pool.nodes[0].stops = GONE
    assert repr(pool.submit().exception(0)) == repr(GONE)
    del pool.nodes[0].stops
    pool.submit("after")
    assert pool.begun == ["after"]


def test_ctrl_c_while_a_gang_is_formed_fails_the_broadcast() -> None:
    pool = Pool()
    pool.nodes[0].stops = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        pool.submit(retries=1)
    assert pool.queue.is_idle


def test_ctrl_c_after_a_broadcast_has_begun_cancels_it() -> None:
    pool = Pool()

    def interrupted(worker: str, spec: object, call: object, *, caller: Any, **_: object) -> None:
        pool.nodes[0].callers[0].sent(1)
        raise KeyboardInterrupt

    pool.nodes[1].call = interrupted
    with pytest.raises(KeyboardInterrupt):
        pool.submit()
    assert pool.nodes[0].cancelled == [1]


def test_at_work_is_what_every_rank_has_and_is_not_being_stopped() -> None:
    pool = Pool()
    assert pool.queue.at_work is None
    future = pool.submit()
    pool.nodes[0].callers[0].sent(1)
    assert pool.queue.at_work is None
    pool.nodes[1].callers[0].sent(1)
    call = pool.queue.at_work
    assert call is not None and call.gang is not None
    call.gang.broken = True
    assert pool.queue.at_work is None
    call.gang.broken = False
    future.cancel()
    call.gang.broken = False
    assert pool.queue.at_work is None


def test_a_broadcast_that_comes_while_the_pool_closes_does_not_hang_nor_hold_up_later_ones() -> None:
    pool = Pool()
    running, waiting = pool.submit(retries=1), pool.submit()
    pool.queue.close()
    late = pool.submit()
    for future in (waiting, late):
        assert isinstance(future.exception(0), sky.CallCancelled)
    pool.fail()
    assert isinstance(running.exception(0), sky.BroadcastError), "there is no other attempt"
    pool.queue.open()
    pool.submit("after")
    assert pool.begun == ["f", "after"]


# ---- retries


def test_a_call_is_started_again_as_often_as_it_says() -> None:
    pool = Pool()
    future = pool.submit(retries=2)
    for number in range(3):
        pool.wait_for(*["f"] * (number + 1))
        assert [node.specs[-1].info["attempt"] for node in pool.nodes] == [number] * 2
        assert pool.nodes[0].specs[-1].info["job_id"] == "pool-1", "what an attempt saved by that name is found again"
        assert not future.done()
        pool.fail(ValueError(f"attempt {number}"))
    error = future.exception(0)
    assert [str(one) for one in error.exceptions] == ["attempt 2"] * 2


def test_an_attempt_that_waits_can_be_cancelled() -> None:
    pool = Pool()
    future = pool.submit(retries=1)
    pool.submit("other")
    pool.fail()
    pool.wait_for("f", "other")
    assert future.cancel()
    pool.fail()
    assert pool.queue.is_idle


def test_an_attempt_waits_for_a_host_that_comes_back() -> None:
    pool = Pool()
    future = pool.submit(retries=1)
    pool.nodes[1].lost = GONE
    pool.fail()
    time.sleep(0.5)
    assert pool.begun == ["f"]
    pool.nodes[1].lost = None
    pool.wait_for("f", "f")
    assert not future.done()


def test_an_attempt_waits_for_lost_hosts_no_longer_than_the_lease() -> None:
    pool = Pool(lease=0.3)
    future = pool.submit(retries=1)
    pool.nodes[1].lost = GONE
    pool.fail()
    assert repr(future.exception(30)) == repr(GONE)
    assert pool.begun == ["f"]


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_an_attempt_that_waits_for_a_host_ends_at_once(end: str) -> None:
    pool = Pool()
    future = pool.submit(retries=1)
    pool.nodes[1].lost = GONE
    pool.fail()
    if end == "cancel":
        future.cancel()
    else:
        pool.queue.close()
    until(lambda: pool.queue.is_idle)
    assert future.done() and pool.begun == ["f"]


def test_an_elastic_call_waits_less_and_continues_without_a_lost_host() -> None:
    pool = Pool(elastic=Elastic(min_hosts=1, max_hosts=2, max_restarts=1))
    pool.submit()
    pool.nodes[1].lost = GONE
    pool.fail()
    until(lambda: pool.begun == ["f", "f"])
    assert len(pool.nodes[1].callers) == 1


@pytest.mark.parametrize(
    ("errors", "attempts"),
    [([ValueError()], 2), ([ValueError(), GONE], 5)],
)
def test_an_elastic_call_is_started_again_more_often_for_lost_hosts(errors: list[Exception], attempts: int) -> None:
    pool = Pool(elastic=Elastic(min_hosts=1, max_hosts=2, max_restarts=3))
    future = pool.submit(retries=1)
    for number in range(attempts):
        assert not future.done()
        pool.wait_for(*["f"] * (number + 1))
        pool.fail(errors[min(number, len(errors) - 1)])
    assert isinstance(future.exception(0), sky.BroadcastError)


# ---- gangs


def run(pool: Pool, **options: Any) -> None:
    """One broadcast, from its submission to its end."""
    pool.submit(**options)
    for node in pool.nodes:
        for caller in node.callers:
            caller.answered(*result(None))
        node.callers.clear()


def test_a_gang_is_kept_while_it_is_what_is_wanted() -> None:
    pool = Pool()
    node = pool.nodes[0]
    run(pool, tree="tree")
    run(pool, tree="tree")
    assert node.specs[0] is node.specs[1]
    assert node.specs[0].info["job_id"] == "pool-1"
    assert list(node.members) == ["gang1.0"] and not node.released
    run(pool, tree="changed")
    assert node.released == ["gang1.0"]
    assert node.specs[2].info["job_id"] == "pool-2"


def test_a_gang_is_replaced_after_the_exit_of_a_member() -> None:
    pool = Pool(ranks=2)
    run(pool)
    assert sorted(pool.nodes[0].members) == ["gang1.0", "gang1.1"]
    pool.nodes[0].members["gang1.1"].exited()
    run(pool)
    assert pool.nodes[1].released == ["gang1.0", "gang1.1"]


def test_output_has_the_rank_of_its_process_also_just_after_its_gang() -> None:
    pool = Pool(ranks=2)
    first, second = pool.nodes
    for number in (1, 2, 3):
        run(pool, tree=str(number))
        assert second.members[f"gang{number}.1"].shown_rank == 3
    assert first.members["gang2.1"].shown_rank == 1
    assert "gang1.1" not in first.members


def test_an_elastic_gang_takes_the_hosts_that_are_left_within_its_limits() -> None:
    queue = Pool(elastic=Elastic(min_hosts=2, max_hosts=3, max_restarts=1)).queue
    nodes: Any = [FakeNode(index) for index in range(4)]
    assert queue.available(nodes) == nodes[:3]
    nodes[0].lost = nodes[1].lost = GONE
    assert queue.available(nodes) == nodes[2:]
    nodes[2].lost = GONE
    with pytest.raises(sky.HostLost, match="1 of 4 hosts"):
        queue.available(nodes)
