"""MapCall against a scheduler that only notes its tasks: how items are grouped, and what ends a map."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import skyfab as sky
from skyfab.calls.pack import PackedFunction
from skyfab.pool import map as module
from skyfab.pool.map import MapCall
from skyfab.pool.scheduler import Task
from skyfab.protocol import codec


class FakeScheduler:
    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def add(self, task: Task) -> None:
        task.started = 1000.0
        self.tasks.append(task)

    def items(self, task: Task) -> list[Any]:
        items, _ = codec.loads(task.arguments.data, task.arguments.buffers)
        return [item for (item,) in items]


class Stage:
    def __init__(self, items: list[Any], slots: int = 1, timeout: float | None = None, retries: int = 0) -> None:
        self.scheduler = FakeScheduler()
        function = sky.function(retries=retries)(len)
        calls = [function(item) for item in items]
        packed = PackedFunction("digest", codec.Payload(b""))
        self.told: list[tuple[int, bool]] = []
        self.call = MapCall(
            self.scheduler,  # type: ignore[arg-type]
            packed,
            calls,
            slots=slots,
            timeout=timeout,
            told=lambda done, failed: self.told.append((done, failed)),
        )
        self.future = self.call.start()

    @property
    def groups(self) -> list[int]:
        return [len(self.scheduler.items(task)) for task in self.scheduler.tasks]

    def answer(self, number: int, spent: float) -> None:
        """The result of each item is the item."""
        task = self.scheduler.tasks[number]
        task.future.settle((spent, self.scheduler.items(task)))


@pytest.fixture(autouse=True)
def at(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """When it is: a call has taken a hundredth of a second unless the test says otherwise."""
    clock = SimpleNamespace(now=1000.01)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_no_items_have_no_results() -> None:
    stage = Stage([])
    assert stage.future.result(0) == []
    assert stage.scheduler.tasks == []


def test_every_slot_begins_with_one_item() -> None:
    assert Stage(list(range(20)), slots=3).groups == [1, 1, 1]
    assert Stage(list(range(2)), slots=3).groups == [1, 1]


def test_results_come_in_the_order_of_items_whatever_ends_first() -> None:
    stage = Stage(list(range(30)), slots=2)
    done: set[int] = set()
    while len(done) < len(stage.scheduler.tasks):
        number = max(set(range(len(stage.scheduler.tasks))) - done)
        done.add(number)
        assert not stage.future.done()
        stage.answer(number, 0.0)
    assert stage.future.result(0) == list(range(30))
    assert sum(stage.groups) == 30


def test_groups_of_short_items_grow_fourfold_and_shrink_towards_the_end() -> None:
    stage = Stage(list(range(100)))
    for number in range(5):
        stage.answer(number, 0.0)
    assert stage.groups[:8] == [1, 4, 4, 16, 16, 16, 16, 14]


def test_long_items_go_one_by_one() -> None:
    stage = Stage(list(range(100)))
    for number in range(4):
        stage.answer(number, 5.0)
    assert set(stage.groups) == {1}


def test_a_group_has_as_much_work_as_a_round_trip_takes(at: SimpleNamespace) -> None:
    stage = Stage(list(range(1000)))
    at.now = 1000.21  # a fifth of a second on the way
    stage.answer(0, 0.01)
    stage.answer(1, 4 * 0.01)
    assert stage.groups[:4] == [1, 4, 4, 16]
    stage.answer(2, 4 * 0.05)
    assert stage.groups[5:] == [1, 1], "a hundredth of a second is enough"


def test_a_map_with_a_timeout_has_a_call_for_each_item() -> None:
    stage = Stage(list(range(20)), timeout=3.0, retries=2)
    stage.answer(0, 0.0)
    assert stage.groups == [1, 1, 1]
    task = stage.scheduler.tasks[0]
    assert task.timeout == 3.0
    assert task.retries == 2
    assert task.each


def test_groups_of_large_items_stay_small() -> None:
    stage = Stage([bytes([number]) * 300_000 for number in range(20)])
    for number in range(4):
        stage.answer(number, 0.0)
    assert max(stage.groups) == 3


@pytest.mark.parametrize("found", [None, (0.1,), (0.1, [1, 2]), (1, [1]), (0.1, (1,)), [0.1, [1]]])
def test_an_answer_that_is_none_ends_the_map(found: object) -> None:
    stage = Stage(list(range(5)))
    stage.scheduler.tasks[0].future.settle(found)
    assert isinstance(stage.future.exception(0), sky.ProtocolError)
    assert len(stage.scheduler.tasks) == 1


def test_a_failure_stops_the_rest() -> None:
    stage = Stage(list(range(20)), slots=3)
    stage.scheduler.tasks[1].future.settle(None, ValueError("first"))
    assert str(stage.future.exception(0)) == "first"
    assert [task.future.cancelled() for task in stage.scheduler.tasks] == [True, False, True]
    assert len(stage.scheduler.tasks) == 3
    assert stage.told == [(0, True)]


def test_two_groups_may_fail_and_the_first_counts() -> None:
    stage = Stage(list(range(10)), slots=2)
    stage.call._fail(ValueError("first"))
    stage.call._fail(ValueError("second"))
    assert str(stage.future.exception(0)) == "first"


def test_cancelling_stops_what_runs_and_begins_nothing() -> None:
    stage = Stage(list(range(20)), slots=2)
    stage.answer(0, 0.0)
    running = len(stage.scheduler.tasks)
    assert stage.future.cancel()
    assert [task.future.cancelled() for task in stage.scheduler.tasks] == [False] + [True] * (running - 1)
    assert len(stage.scheduler.tasks) == running
    assert stage.told == [(1, False), (1, True)]


def test_progress_is_told_now_and_then_and_at_the_end(at: SimpleNamespace) -> None:
    stage = Stage(list(range(6)), timeout=1.0)
    for number in range(6):
        stage.answer(number, 0.01)
        at.now += 0.06
    assert stage.told == [(1, False), (3, False), (5, False), (6, False)]


def test_an_item_that_cannot_be_pickled_ends_the_map() -> None:
    stuck = (each for each in ())
    with pytest.raises(sky.NotPicklable):
        Stage([stuck])
    stage = Stage([1, stuck])
    stage.answer(0, 0.0)
    assert isinstance(stage.future.exception(0), sky.NotPicklable)


def test_the_future_reads_from_a_host_of_the_map() -> None:
    stage = Stage([1, 2])
    assert stage.future.node is None
    node: Any = object()
    stage.scheduler.add = lambda task: setattr(task.future, "node", node)  # type: ignore[method-assign]
    stage.call._send()
    assert stage.future.node is node
