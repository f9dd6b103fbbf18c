"""The reader without its thread: what one look at the connections does, and who is told."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import skyfab as sky
from skyfab.session import reader as module
from skyfab.session.reader import READ, WRITE, SharedReader, refuse_nested_wait

Actions = Sequence[Callable[[], None]]


class HandReader(SharedReader):
    """Its own thread does nothing."""

    def _start(self) -> threading.Thread:
        return threading.current_thread()


class FakeSelector:
    """Notes for how long it was asked to wait; what is ready is what the test says."""

    def __init__(self) -> None:
        self.watched: dict[int, int] = {}
        self.ready: list[int] = []
        self.waits: list[float] = []
        self.closed = False

    def register(self, fd: int, events: int) -> None:
        self.watched[fd] = events

    def unregister(self, fd: int) -> None:
        del self.watched[fd]

    def poll(self, seconds: float) -> list[tuple[int, int]]:
        self.waits.append(seconds)
        ready, self.ready = self.ready, []
        return [(fd, self.watched[fd]) for fd in ready]

    def close(self) -> None:
        self.closed = True


class Connection:
    def __init__(self, interval: float = 5.0) -> None:
        self.interval = interval
        self.told: list[Any] = []
        self.actions: Actions = ()
        self.defect: BaseException | None = None

    def _on(self, what: Any) -> Actions:
        self.told.append(what)
        if self.defect is not None:
            raise self.defect
        return self.actions

    def on_ready(self, fd: int) -> Actions:
        return self._on(fd)

    def on_wake(self) -> Actions:
        return self._on("wake")

    def on_tick(self, now: float) -> Actions:
        return self._on("tick")

    def on_error(self, error: BaseException) -> Actions:
        self.told.append(error)
        return ()


class Stage:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        monkeypatch.setattr(module, "new_selector", FakeSelector)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))
        self.reader = HandReader()
        self.one, self.two = Connection(5.0), Connection(2.0)
        self.reader.add(self.one)
        self.reader.add(self.two)
        self.selector: Any = self.reader._selector
        self.look()
        assert self.one.told == self.two.told == ["tick"], "at once"
        self.one.told.clear()
        self.two.told.clear()
        self.selector.waits.clear()

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def look(self, timeout: float | None = None) -> None:
        self.reader._read_once(timeout)

    def poked(self) -> bool:
        """Whether somebody wanted to interrupt the wait since the last look."""
        try:
            return bool(os.read(self.reader._waker, 100))
        except BlockingIOError:
            return False


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    stage = Stage(monkeypatch)
    stage.poked()
    yield stage
    stage.reader._connections.clear()
    stage.reader._is_over()


# ---- one look


def test_it_waits_until_the_next_tick_or_the_end_of_the_callers_time(stage: Stage) -> None:
    stage.look()
    stage.look(1.5)
    stage.look(3.0)
    stage.now += 5
    stage.look()
    assert stage.selector.waits == [2.0, 1.5, 2.0, 0]


def test_ticks_come_at_the_shortest_interval(stage: Stage) -> None:
    stage.now += 1.9
    stage.look()
    assert stage.one.told == []
    stage.now += 0.1
    stage.look()
    assert stage.one.told == stage.two.told == ["tick"]
    stage.look()
    assert stage.selector.waits[-1] == 2.0


def test_what_is_ready_is_told_to_its_owner(stage: Stage) -> None:
    done: list[int] = []
    stage.reader.watch(101, stage.one)
    stage.reader.watch(102, stage.two, writing=True)
    assert stage.selector.watched[101] == READ
    assert stage.selector.watched[102] == WRITE
    stage.two.actions = [lambda: done.append(1)]
    stage.selector.ready = [102]
    stage.look()
    assert (stage.one.told, stage.two.told, done) == ([], [102], [1])
    stage.reader.unwatch(102)
    stage.reader.unwatch(102)
    assert 102 not in stage.selector.watched
    assert 102 not in stage.reader._owners


def test_a_poke_is_read_and_means_nothing_else(stage: Stage) -> None:
    stage.reader.poke()
    stage.selector.ready = [stage.reader._waker]
    stage.look()
    stage.selector.ready = [stage.reader._waker]
    stage.look()
    assert not stage.poked()
    assert stage.one.told == []


def test_who_reads_needs_no_poke(stage: Stage) -> None:
    stage.reader._reader = threading.get_ident()
    stage.reader.poke()
    assert not stage.poked()
    stage.reader._reader = 0
    stage.reader.poke()
    assert stage.poked()


def test_a_wake_is_heard_once_and_without_waiting(stage: Stage) -> None:
    stage.reader.wake(stage.one)
    stage.reader.wake(stage.one)
    assert stage.poked()
    stage.look()
    assert stage.selector.waits == [0]
    assert stage.one.told == ["wake"]
    stage.look()
    assert stage.one.told == ["wake"]


def test_a_retry_comes_after_a_short_time(stage: Stage) -> None:
    stage.reader.retry_soon(stage.one)
    assert stage.poked()
    stage.look()
    assert 0 < stage.selector.waits[0] < 0.1
    assert stage.one.told == ["wake"]
    stage.look()
    assert stage.selector.waits[1] == 2.0


def test_a_connection_that_raises_is_told_and_the_others_go_on(stage: Stage) -> None:
    stage.one.defect = ValueError("a defect")
    for fd, connection in ((101, stage.one), (102, stage.two)):
        stage.reader.watch(fd, connection)
    stage.selector.ready = [101, 102]
    stage.look()
    assert stage.one.told == [101, stage.one.defect]
    assert stage.two.told == [102]
    stage.one.defect = SystemExit(3)
    stage.selector.ready = [101]
    with pytest.raises(SystemExit):
        stage.look()
    assert stage.reader._reader == 0


def test_an_action_that_raises_keeps_no_other_from_running(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    done: list[int] = []

    def fail(error: BaseException) -> Callable[[], None]:
        def action() -> None:
            raise error

        return action

    stage.reader.run([fail(ValueError("odd")), lambda: done.append(1)])
    assert done == [1]
    assert "odd" in capfd.readouterr().err
    with pytest.raises(SystemExit) as raised:
        stage.reader.run([fail(SystemExit(1)), fail(SystemExit(2)), lambda: done.append(2)])
    assert raised.value.code == 1
    assert done == [1, 2]
    assert capfd.readouterr().err == ""
    other = threading.Thread(target=stage.reader.run, args=([fail(SystemExit(1)), lambda: done.append(3)],))
    other.start()
    other.join()
    assert done == [1, 2, 3]
    assert "SystemExit" in capfd.readouterr().err, "on another thread it would end nothing"


@pytest.mark.parametrize("acts", [True, False])
@pytest.mark.parametrize("how", ["ready", "wake", "tick"])
def test_those_who_follow_are_told_when_something_happened(stage: Stage, how: str, acts: bool) -> None:
    event = threading.Event()
    stage.reader._followers.append(event)
    stage.one.actions = [lambda: None] if acts else []
    if how == "ready":
        stage.reader.watch(101, stage.one)
        stage.selector.ready = [101]
    elif how == "wake":
        stage.reader.wake(stage.one)
    else:
        stage.now += 2
    stage.look()
    assert event.is_set() is acts


# ---- waiting


def test_a_caller_reads_until_it_is_done(stage: Stage) -> None:
    stage.reader.watch(101, stage.one)
    stage.selector.ready = [101]
    assert stage.reader.wait(lambda: stage.one.told == [101])
    assert stage.reader._callers == []
    assert stage.reader._last_call == stage.now
    refuse_nested_wait()


def test_a_callers_time_may_be_up(stage: Stage) -> None:
    poll = stage.selector.poll

    def pass_time(seconds: float) -> Any:
        stage.now += seconds
        return poll(seconds)

    stage.selector.poll = pass_time
    assert not stage.reader.wait(lambda: False, 0.5)
    assert stage.selector.waits == [0.5]


def test_nobody_waits_inside_a_wait(stage: Stage) -> None:
    errors: list[Exception] = []

    def inner() -> None:
        try:
            stage.reader.wait(lambda: True)
        except sky.UsageError as error:
            errors.append(error)

    stage.one.actions = [inner]
    stage.reader.wake(stage.one)
    stage.reader.wait(lambda: bool(errors))
    assert len(errors) == 1


def test_a_caller_interrupts_the_thread_that_reads_and_wakes_it_after_a_rest(stage: Stage) -> None:
    assert stage.reader.wait(lambda: True)
    assert not stage.poked()
    assert not stage.reader._rested.is_set()
    stage.reader._thread_reads = stage.reader._resting = True
    assert stage.reader.wait(lambda: True)
    assert stage.poked()
    assert stage.reader._rested.is_set()


def test_a_caller_that_leaves_wakes_one_who_follows(stage: Stage) -> None:
    first, second = threading.Event(), threading.Event()
    stage.reader._followers += [first, second]
    stage.reader._resting = True
    assert stage.reader.wait(lambda: True)
    assert (first.is_set(), second.is_set()) == (True, False)
    assert not stage.reader._rested.is_set()


def test_who_cannot_read_follows(stage: Stage) -> None:
    looks: list[int] = []

    def done() -> bool:
        looks.append(len(stage.reader._followers))
        return len(looks) > 3

    with stage.reader.reading:
        assert stage.reader.wait(done)
    assert stage.reader._followers == []
    assert stage.selector.waits == []


def test_without_connections_nobody_waits(stage: Stage) -> None:
    stage.reader.discard(stage.one)
    assert not stage.reader._rested.is_set()
    stage.reader.discard(stage.two)
    assert stage.reader._rested.is_set()
    assert stage.poked()
    assert not stage.reader.wait(lambda: False)
    assert stage.selector.waits == []


# ---- its own thread


def test_the_thread_leaves_reading_to_callers_that_follow_each_other(stage: Stage) -> None:
    stage.reader._last_call = stage.now
    stage.reader._step_back()
    assert len(stage.slept) == 1, "until nobody has called for a while"
    stage.reader._step_back()
    assert len(stage.slept) == 1


def test_the_thread_rests_while_a_caller_waits_long(stage: Stage) -> None:
    rests: list[bool] = []

    def rest(seconds: float) -> None:
        rests.append(stage.reader._resting)
        stage.reader._callers.clear()

    stage.reader._rested.wait = rest  # type: ignore[method-assign, assignment]
    stage.reader._callers.append(None)
    stage.reader._step_back()
    assert rests == [True]
    assert not stage.reader._resting
    assert sum(stage.slept) >= 0.2


def test_what_the_reader_has_is_closed_with_its_last_connection(stage: Stage) -> None:
    reader = stage.reader
    assert not reader._is_over()
    waker, poker = reader._waker, reader._poker
    reader.wake(stage.one)
    reader.retry_soon(stage.one)
    reader._connections.clear()
    assert reader._is_over()
    assert reader._is_over()
    assert stage.selector.closed
    assert (reader._thread, reader._selector, reader._waker, reader._poker) == (None, None, -1, -1)
    assert not reader._woken
    assert not reader._retrying
    for fd in (waker, poker):
        with pytest.raises(OSError):
            os.fstat(fd)
    reader.poke()
    reader.unwatch(101)
    stage.look()


def test_joining_waits_for_the_thread_when_nothing_is_left(stage: Stage) -> None:
    joined: list[float] = []
    thread: Any = SimpleNamespace(join=joined.append)
    stage.reader._thread = thread
    stage.reader.join(3)
    assert joined == []
    stage.reader._connections.clear()
    stage.reader.join(3)
    assert joined == [3]
    stage.reader._thread = threading.current_thread()
    stage.reader.join(3)


def test_a_child_leaves_everything_to_its_parent(stage: Stage) -> None:
    reader = stage.reader
    reader.watch(101, stage.one)
    reader.reading.acquire()
    waker = reader._waker
    reader.leave_to_parent()
    assert stage.selector.closed
    assert 101 in stage.selector.watched, "the parent goes on watching"
    assert not reader.reading.locked()
    assert not reader._connections
    assert not reader._owners
    assert (reader._thread, reader._selector, reader._waker, reader._poker) == (None, None, -1, -1)
    with pytest.raises(OSError):
        os.fstat(waker)
    reader.leave_to_parent()
