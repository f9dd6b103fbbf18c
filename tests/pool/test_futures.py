"""CallFuture: who waits reads, who cancels stops the call, and who may not wait is told so."""

from __future__ import annotations

import concurrent.futures
import threading
from concurrent.futures import InvalidStateError, wait
from typing import Any

import pytest
from stage.spot import until

import skyfab as sky
from skyfab.pool.futures import CallFuture, refuse_to_block
from skyfab.ui.events import emitting


class FakeSession:
    """Gives the answer when somebody reads."""

    def __init__(self, future: CallFuture) -> None:
        self.future = future
        self.timeouts: list[float | None] = []
        self.pokes = 0

    def read_until(self, done: Any, timeout: float | None = None) -> bool:
        self.timeouts.append(timeout)
        assert not done()
        self.future.settle("read")
        assert done()
        return True

    def poke(self) -> None:
        self.pokes += 1


class FakeNode:
    def __init__(self, future: CallFuture) -> None:
        self.session = FakeSession(future)


@pytest.fixture
def future() -> CallFuture:
    future = CallFuture()
    future.node = FakeNode(future)  # type: ignore[assignment]
    return future


def session(future: CallFuture) -> FakeSession:
    return future.node.session  # type: ignore[union-attr, return-value]


def test_who_waits_reads_and_needs_no_waking(future: CallFuture) -> None:
    assert future.result() == "read"
    assert future.exception() is None
    assert session(future).timeouts == [None]
    assert session(future).pokes == 0


def test_a_result_that_is_there_is_not_waited_for(future: CallFuture) -> None:
    future.settle("there")
    assert future.result(5) == "there"
    assert future._read(5) == 5
    assert session(future).timeouts == []


def test_a_result_from_another_thread_wakes_who_reads(future: CallFuture) -> None:
    future._waiter = (threading.get_ident() + 1, future.node)  # type: ignore[assignment]
    future.settle(1)
    assert session(future).pokes == 1


def test_a_failure_is_waited_for_as_a_result_is(future: CallFuture) -> None:
    error = ValueError("no")
    session(future).read_until = lambda done, timeout=None: bool(future.settle(None, error))  # type: ignore[method-assign, assignment, func-returns-value]
    assert future.exception() is error
    with pytest.raises(ValueError, match="no"):
        future.result()


def test_a_cancelled_call_is_done_for_those_who_wait_for_several(future: CallFuture) -> None:
    assert future.cancel()
    assert wait([future], timeout=0).done == {future}


def test_nobody_is_woken_where_nobody_waits(future: CallFuture) -> None:
    future.settle(1)
    assert session(future).pokes == 0


def test_a_call_that_has_no_host_yet_is_waited_for(future: CallFuture) -> None:
    future.node = None
    with pytest.raises(concurrent.futures.TimeoutError):
        future.result(0.01)


def test_another_process_cannot_wait(future: CallFuture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyfab.pool.futures.os.getpid", lambda: -1)
    with pytest.raises(sky.UsageError, match="another process"):
        future.result()


def test_a_subscriber_of_events_cannot_wait() -> None:
    refuse_to_block()
    emitting.add(threading.get_ident())
    try:
        with pytest.raises(sky.UsageError, match="subscriber"):
            CallFuture().result(0)
    finally:
        emitting.discard(threading.get_ident())


def test_a_callback_runs_on_a_thread_of_its_own(future: CallFuture) -> None:
    threads: list[int] = []
    future.add_done_callback(lambda _: threads.append(threading.get_ident()))
    future.settle(1)
    until(lambda: bool(threads))
    assert threads != [threading.get_ident()]


def test_what_has_ended_cannot_be_cancelled(future: CallFuture) -> None:
    future.on_cancel = lambda: pytest.fail("told")
    future.settle(1)
    assert not future.cancel()


def test_a_result_that_comes_after_cancelling_is_dropped(future: CallFuture) -> None:
    assert future.cancel()
    future.settle(1)
    future.settle(None, ValueError())
    assert future.cancelled()


def test_two_results_are_an_error(future: CallFuture) -> None:
    future.settle(1)
    with pytest.raises(InvalidStateError):
        future.settle(2)
