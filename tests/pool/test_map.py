"""MapCall against a scheduler that only notes its tasks: how items are grouped, and what ends a map."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import skyfab as sky
from skyfab.calls.pack import PackedCall, PackedFunction
from skyfab.pool import map as module
from skyfab.pool.map import MapCall
from skyfab.pool.task import Task
from skyfab.protocol import codec
from skyfab.protocol.batches import of_group


class FakeScheduler:
    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.tasks: list[Task] = []

    def slots_for(self, gpus: float) -> int:
        return self._slots

    def add(self, task: Task) -> None:
        task.started = 1000.0
        self.tasks.append(task)

    def items(self, task: Task) -> list[Any]:
        packed = task.call.arguments
        return [codec.loads(data, more)[0] for data, *more in of_group([memoryview(packed.data), *packed.buffers])]


class Stage:
    def __init__(self, items: list[Any], slots: int = 1, retries: int = 0, **options: Any) -> None:
        self.scheduler = options.pop("scheduler", None) or FakeScheduler(slots)
        function = sky.function(retries=retries)(len)
        calls = [function(item) for item in items]
        nothing, timeout = codec.Payload(b""), options.pop("timeout", None)
        function_there = PackedFunction("digest", nothing)
        each = PackedCall(function=function_there, arguments=nothing, label="len", timeout=timeout, retries=retries)
        self.told: list[tuple[int, bool]] = []
        self.call = MapCall(
            self.scheduler,  # type: ignore[arg-type]
            each,
            calls,
            progress=lambda done, failed: self.told.append((done, failed)),
            **options,
        )
        self.future = self.call.start()

    @property
    def groups(self) -> list[int]:
        return [len(self.scheduler.items(task)) for task in self.scheduler.tasks]

    def answer(self, number: int, spent: float) -> None:
        """The result of each item is the item."""
        task = self.scheduler.tasks[number]
        task.future.settle([spent, *self.scheduler.items(task)])


@pytest.fixture(autouse=True)
def at(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """When it is: a call has taken a hundredth of a second unless the test says otherwise."""
    clock = SimpleNamespace(now=1000.01)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_an_exception_takes_the_place_of_its_result() -> None:
    stage = Stage([1, 2, 3], slots=2, errors="return")
    wrong = ValueError("two")
    stage.scheduler.tasks[1].future.settle(None, wrong)
    stage.answer(0, 0.0)
    stage.answer(2, 0.0)
    assert stage.future.result(0) == [1, wrong, 3]
    assert vars(wrong)["item_index"] == 1
    assert stage.told[-1] == (3, False)


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
    assert task.call.timeout == 3.0
    assert task.retries == 2
    assert task.each


def test_groups_of_large_items_stay_small() -> None:
    stage = Stage([bytes([number]) * 300_000 for number in range(20)])
    for number in range(4):
        stage.answer(number, 0.0)
    assert max(stage.groups) == 3


def test_items_after_large_results_are_sent_again() -> None:
    """A host ends a group whose results are enough for a message."""
    stage = Stage(list(range(20)))
    stage.answer(0, 0.0)
    assert stage.groups == [1, 4, 4]
    task = stage.scheduler.tasks[1]
    task.future.settle([0.0, *stage.scheduler.items(task)[:2]])
    assert [stage.scheduler.items(task) for task in stage.scheduler.tasks[2:]] == [[5, 6, 7, 8], [3, 4], [9, 10]]
    for number in range(2, 20):
        if number < len(stage.scheduler.tasks):
            stage.answer(number, 0.0)
    assert stage.future.result(0) == list(range(20))


@pytest.mark.parametrize(
    "found", [[], [0.1], [0.1, 1, 2], [1, 1], [None, 1], [float("nan"), 1], [float("inf"), 1], [-1.0, 1]]
)
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


# ---- which item failed


class Rude:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def failed(items: list[Any], error: Exception, *, number: int = 0) -> BaseException:
    """The error of a map of which that group failed, after those before it."""
    stage = Stage(items)
    for before in range(number):
        stage.answer(before, 0.0)
    stage.scheduler.tasks[number].future.settle(None, error)
    found = stage.future.exception(0)
    assert found is error
    return found


def notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))


def test_an_error_says_which_item_it_comes_from() -> None:
    error = failed(list("abcdefghijklmnopqrst"), ValueError("first"))
    assert (error.item_index, notes(error)) == (0, ["in the map: item 0, 'a'"])  # type: ignore[attr-defined]
    inner = ValueError("inside a group of four")
    inner.__cause__ = sky.RemoteTraceback("", "node1", item=2)
    error = failed(list("abcdefghijklmnopqrst"), inner, number=1)
    assert (error.item_index, notes(error)) == (3, ["in the map: item 3, 'd'"])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("item", "shown"),
    [(Rude(), "<Rude instance at 0x"), ("x" * 10_000, "'xxx"), ("\x1b[2Jboo", "'\\x1b[2Jboo'"), (10**5000, "")],
    ids=["raises", "long", "controls", "digits"],
)
def test_an_item_is_shown_shortly_whatever_its_repr_does(item: object, shown: str) -> None:
    (note,) = notes(failed([item], ValueError("x")))
    assert note.startswith(f"in the map: item 0, {shown}")
    assert len(note) < 150


def halved(number: int) -> float:
    return 1 / (number - 700)


def test_the_host_says_which_item_of_a_group_it_was() -> None:
    with sky.Compute("local", ui="none") as compute, pytest.raises(ZeroDivisionError) as caught:
        compute.map(halved, range(1000))
    assert caught.value.item_index == 700  # type: ignore[attr-defined]
    assert notes(caught.value) == ["in the map: item 700, 700"]


# ---- items of a group do not see each other


def appended(numbers: list[int]) -> int:
    numbers.append(0)
    return len(numbers)


def mean(numbers: Any) -> float:
    found = float(numbers.mean())
    numbers[:] = 0
    return found


SCRATCH = np.zeros(1000)


def filled(number: int) -> Any:
    SCRATCH[:] = number
    return SCRATCH


def pair(number: int) -> Any:
    return [number, (each for each in ()) if number == 70 else None]


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.Compute]:
    with sky.Compute("local", slots=2, ui="none") as compute:
        yield compute


def test_what_a_call_changes_in_its_arguments_no_other_call_sees(pool: sky.Compute) -> None:
    assert pool.map(appended, [[]] * 100) == [1] * 100


@pytest.mark.parametrize("size", [10, 1000, 200_000])
def test_nor_in_arrays_of_any_size(pool: sky.Compute, size: int) -> None:
    array = np.ones(size)
    assert pool.map(mean, [array] * 60) == [1.0] * 60
    assert pool.map(mean, [pool.put(array)] * 60) == [1.0] * 60


def test_a_result_is_as_it_was_when_the_call_returned_it(pool: sky.Compute) -> None:
    assert [set(found) for found in pool.map(filled, range(100))] == [{number} for number in range(100)]


def arrays(number: int) -> list[Any]:
    return [np.full(256, number)] * 3 + [np.full(256, number + 1)]


def test_results_that_are_more_than_fits_into_a_message(pool: sky.Compute) -> None:
    """Each has two buffers; 8,192 is the most."""
    found = pool.map(arrays, range(6000))
    assert [int(each[0][0]) for each in found] == list(range(6000))
    assert max(int(each[-1][-1]) for each in found) == 6000


def test_a_result_that_cannot_be_pickled_has_the_index_of_its_item(pool: sky.Compute) -> None:
    with pytest.raises(sky.NotPicklable) as caught:
        pool.map(pair, range(100))
    assert caught.value.item_index == 70  # type: ignore[attr-defined]
    assert pool.map(appended, [[]] * 3) == [1] * 3
