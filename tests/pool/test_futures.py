"""CallFuture: cancelling stops the call, and threads that may not wait get an error."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from stage.spot import until

import skyfab as sky
from skyfab.pool.futures import CallFuture, refuse_to_block, wait_for
from skyfab.ui.events import Events, emitting


@pytest.fixture
def future() -> CallFuture:
    return CallFuture()


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


@pytest.mark.parametrize("is_done", [True, False])
def test_what_would_end_a_loop_is_raised_by_await(future: CallFuture, is_done: bool) -> None:
    raised = StopIteration(3)

    async def main() -> None:
        if is_done:
            future.settle(None, raised)
        else:
            asyncio.get_running_loop().call_later(0.01, future.settle, None, raised)
        await asyncio.wait_for(future, 30)

    with pytest.raises(RuntimeError) as found:
        asyncio.run(main())
    assert found.value.__cause__ is raised


def test_a_call_that_was_cancelled_cancels_who_awaits_it(future: CallFuture) -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(0.01, future.cancel)
        await future

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())


def test_ctrl_c_stops_the_call_and_says_where(future: CallFuture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(future, "result", interrupted)
    nodes: list[Any] = [SimpleNamespace(name="node1"), SimpleNamespace(name="node2")]
    with pytest.raises(KeyboardInterrupt) as raised:
        wait_for(future, nodes, Events().waiting)
    assert future.cancelled()
    assert vars(raised.value)["stopped"] == "stopped on node1, node2"


def test_a_result_that_comes_after_cancelling_is_dropped(future: CallFuture) -> None:
    assert future.cancel()
    future.settle(1)
    future.settle(None, ValueError())
    assert future.cancelled()
