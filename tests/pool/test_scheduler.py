"""The queue of solo calls, against nodes that only note what they are told: order, cancelling, lost hosts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import skyfab as sky
from skyfab.calls.pack import PackedFunction
from skyfab.pool.futures import CallFuture
from skyfab.pool.node import WorkerSpec
from skyfab.pool.scheduler import Scheduler, Slot, Task
from skyfab.protocol import codec, messages

PLAN = WorkerSpec(tree="", env={}, info={})


class FakeSession:
    def __init__(self) -> None:
        self.has_ended = False

    def read_until(self, done: Callable[[], bool], timeout: float | None = None) -> bool:
        deadline = time.monotonic() + (5 if timeout is None else timeout)
        while not done() and time.monotonic() < deadline:
            time.sleep(0.001)
        return done()

    def poke(self) -> None:
        pass


class FakeNode:
    """A host that takes calls and answers when the test says so."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lost: Exception | None = None
        self.session = FakeSession()
        self.callers: list[Any] = []
        self.cancelled: list[int] = []
        self.is_gone = False

    def call(self, worker: str, plan: WorkerSpec, function: Any, arguments: Any, *, caller: Any, **_: Any) -> None:
        if self.is_gone:
            raise sky.HostLost("gone", host=self.name)
        self.callers.append(caller)

    def cancel(self, stream: int) -> None:
        self.cancelled.append(stream)

    def note_lost(self, error: Exception) -> None:
        if self.lost is None and self.session.has_ended:
            self.lost = error

    def lose(self) -> None:
        self.is_gone = self.session.has_ended = True


def started(label: str, host: str) -> Callable[[BaseException | None], None]:
    return lambda error: None


def queue_over(*nodes: FakeNode) -> Scheduler:
    queue = Scheduler(started)
    queue.open(Slot(node, "solo.0", PLAN) for node in nodes)  # type: ignore[arg-type]
    return queue


def task(**options: Any) -> Task:
    function = PackedFunction("digest", codec.Payload(b""))
    return Task(function, codec.Payload(bytes(100_000)), label="f", timeout=None, **options)


def result(value: object) -> tuple[messages.Message, list[memoryview]]:
    payload = codec.dumps(value)
    return messages.Result(parts=[len(payload.data)]), [memoryview(payload.data)]


# ---- hosts that are lost


def test_thousands_of_waiting_calls_all_fail_when_the_last_host_is_lost() -> None:
    """Each used to be failed inside the one before it: past a thousand, that was a RecursionError and a hang."""
    node = FakeNode("node1")
    queue = queue_over(node)
    tasks = [task() for _ in range(5000)]
    for each in tasks:
        queue.add(each)
    node.lose()
    tasks[0].failed(sky.HostLost("gone", host="node1"))
    assert all(isinstance(each.future.exception(0), sky.HostLost) for each in tasks)


def test_thousands_of_calls_that_fail_to_be_sent_one_after_another_all_fail() -> None:
    node = FakeNode("node1")
    queue = queue_over(node)
    tasks = [task() for _ in range(5000)]
    for each in tasks:
        queue.add(each)
    node.is_gone = True  # and its session has not said so yet
    tasks[0].failed(sky.HostLost("gone", host="node1"))
    assert all(isinstance(each.future.exception(0), sky.HostLost) for each in tasks)


def test_a_call_for_a_lost_host_does_not_keep_others_waiting() -> None:
    lost, there = FakeNode("node1"), FakeNode("node2")
    queue = queue_over(lost, there)
    lost.lost = sky.HostLost("gone", host="node1")
    pinned, free = task(on=lost), task()
    queue.add(pinned)
    queue.add(free)
    assert isinstance(pinned.future.exception(0), sky.HostLost)
    assert there.callers == [free]


def test_what_a_session_that_was_replaced_says_late_does_not_lose_the_new_one() -> None:
    node = FakeNode("node1")
    queue = queue_over(node)
    late = task()
    queue.add(late)
    late.failed(sky.HostLost("said by the session before", host="node1"))
    assert node.lost is None


# ---- cancelling


def test_cancelling_a_call_that_was_moved_stops_nothing_else_on_its_new_host() -> None:
    """The number that it had on the lost host is another call's on the new one."""
    first, second = FakeNode("node1"), FakeNode("node2")
    queue = queue_over(first)
    moved = task(retries=1)
    queue.add(moved)
    moved.sent(51)
    queue.open([Slot(second, "solo.0", PLAN)])  # type: ignore[list-item]
    first.lose()
    moved.failed(sky.HostLost("gone", host="node1"))
    assert second.callers == [moved], "its arguments are on their way"
    assert moved.future.cancel()
    assert second.cancelled == []
    assert not moved.is_wanted(), "and it is not sent when they are there"


def test_a_call_that_is_cancelled_in_the_moment_it_is_sent_is_stopped() -> None:
    node = FakeNode("node1")
    queue = queue_over(node)
    one = task()
    queue.add(one)
    one.future.cancel()
    assert node.cancelled == []
    one.sent(7)
    assert node.cancelled == [7]


def test_cancelling_twice_is_cancelling_once() -> None:
    node = FakeNode("node1")
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
        gate, answers = threading.Barrier(4), list[object]()

        def cancel(future: CallFuture = future, gate: threading.Barrier = gate, to: list[object] = answers) -> None:
            gate.wait()
            try:
                to.append(future.cancel())
            except BaseException as error:
                to.append(error)

        threads = [threading.Thread(target=cancel) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [True] * 4
        assert told == [1]


# ---- waiting


def test_a_timeout_is_waited_for_once() -> None:
    """The wait that reads and the one behind it used to have the whole timeout each."""
    node = FakeNode("node1")
    waits: list[float] = []
    node.session.read_until = lambda done, timeout=None: bool(waits.append(timeout))  # type: ignore[assignment, arg-type, func-returns-value]
    future = CallFuture()
    future.node = node  # type: ignore[assignment]
    for ask in (future.result, future.exception):
        left = future._read(0.3)
        assert waits.pop() == 0.3
        assert left is not None
        assert left <= 0.3
        with pytest.raises(TimeoutError):
            ask(0.001)
        waits.clear()


def test_the_time_that_reading_took_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeNode("node1")
    future = CallFuture()
    future.node = node  # type: ignore[assignment]
    now = [100.0]
    monkeypatch.setattr("skyfab.pool.futures.time.monotonic", lambda: now[0])

    def wait(done: Callable[[], bool], timeout: float | None = None) -> bool:
        now[0] += timeout or 0
        return False

    node.session.read_until = wait  # type: ignore[method-assign]
    assert future._read(2) == 0


# ---- maps


def test_two_groups_of_a_map_may_fail(capfd: pytest.CaptureFixture[str]) -> None:
    from skyfab.pool.map import MapCall

    nodes = [FakeNode("node1"), FakeNode("node2")]
    queue = queue_over(*nodes)
    function = PackedFunction("digest", codec.Payload(b""))
    calls = [sky.function(len)("four") for _ in range(10)]
    spread = MapCall(queue, function, calls, slots=2, timeout=None)
    future = spread.start()
    spread._fail(ValueError("first"))
    spread._fail(ValueError("second"))
    assert str(future.exception(0)) == "first"
    assert capfd.readouterr().err == ""


def test_answers_come_back_to_their_calls() -> None:
    node = FakeNode("node1")
    queue = queue_over(node)
    one, two = task(), task()
    queue.add(one)
    queue.add(two)
    assert node.callers == [one], "the other waits for the slot"
    one.answered(*result("first"))
    assert one.future.result(0) == "first"
    two.answered(*result("second"))
    assert two.future.result(0) == "second"
