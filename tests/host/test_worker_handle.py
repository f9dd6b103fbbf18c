"""A seat and its calls, with a clock and a process of the test's own: what is cancelled ends, and nothing else does."""

from __future__ import annotations

import signal

import pytest
from stand_in import Agent, Process

from skyfab.host.agent.worker_handle import Running, WorkerHandle
from skyfab.protocol.frames import BYE, frame


def give(worker: WorkerHandle, *streams: int, timeout: float | None = None) -> None:
    for stream in streams:
        worker.give(Running(stream, timeout), b"{}", b"")
        worker.flush()


def test_a_function_that_a_call_uses_is_forgotten_later(worker: WorkerHandle, process: Process) -> None:
    worker.functions |= {"used", "unused", "known"}
    worker.give(Running(1, None, "used"), b"{}", b"")
    for forgotten in ("unused", "used"):
        process.heard()
        worker.forget(["known"])
        worker.flush()
        assert f'"digests":["{forgotten}"]'.encode() in process.heard()
        worker.calls.clear()
    assert worker.functions == {"known"}


def test_a_call_behind_one_that_is_cancelled_is_not_begun_in_its_process(
    agent: Agent, worker: WorkerHandle, process: Process
) -> None:
    """The answer may come while the signal is on its way, and be found only when the process is gone."""
    give(worker, 1, 3, 5)
    process.heard()
    worker.cancel(1)
    process.answer(1)
    worker.output.read()
    assert process.heard() == b"", "the next call was begun"
    worker.ended(-signal.SIGTERM, "its process was killed by SIGTERM")
    assert agent.answers() == {1: "result", 3: "unstarted", 5: "unstarted"}


def test_a_call_that_comes_while_the_process_ends_waits_for_that(
    agent: Agent, worker: WorkerHandle, process: Process
) -> None:
    """Else it goes back and forth between client and agent until the client gives up."""
    give(worker, 1)
    process.heard()
    worker.cancel(1)
    process.answer(1)
    worker.output.read()
    give(worker, 3, 5, 7)
    assert process.heard() == b""
    assert agent.answers() == {1: "result"}
    worker.cancel(3)
    worker.take_back(5, "unassigned")
    worker.ended(-signal.SIGTERM, "its process was killed by SIGTERM")
    assert agent.answers() == {1: "result", 3: "cancelled", 5: "unassigned", 7: "unstarted"}


def test_a_process_that_wants_no_more_calls_and_stays_is_ended(
    agent: Agent, worker: WorkerHandle, process: Process
) -> None:
    give(worker, 1, 3)
    process.heard()
    process.say(frame(BYE))
    process.answer(1)
    worker.output.read()
    worker.output.read()
    assert agent.answers() == {1: "result"}
    assert process.heard() == b"", "the next call was begun"
    agent.look()
    assert agent.signals == [], "it may end by itself"
    agent.time += 10.0
    agent.look()
    assert agent.signals == [signal.SIGKILL]


@pytest.mark.parametrize("how", ["cancel", "timeout"])
def test_a_process_that_wants_no_more_calls_and_does_not_reply_is_ended(
    agent: Agent, worker: WorkerHandle, process: Process, how: str
) -> None:
    """Describing an error may take forever."""
    give(worker, 1, timeout=5.0)
    process.heard()
    process.say(frame(BYE))
    worker.output.read()
    if how == "cancel":
        worker.cancel(1)
    agent.time += 6.0
    agent.look()
    assert agent.signals[:1] == [signal.SIGTERM]
    agent.time += 10.0
    agent.look()
    assert agent.signals == [signal.SIGTERM, signal.SIGKILL]


def test_the_time_of_a_pipelined_call_begins_when_those_before_it_have_replies(
    agent: Agent, worker: WorkerHandle, process: Process
) -> None:
    """It is in the process already, and waits there."""
    worker.pipelined = True
    give(worker, 1)
    give(worker, 3, timeout=5.0)
    agent.time = 6.0
    agent.look()
    assert agent.signals == []
    process.answer(1)
    worker.output.read()
    agent.time = 10.0
    agent.look()
    assert agent.signals == []
    agent.time = 11.5
    agent.look()
    assert agent.signals == [signal.SIGTERM]


def test_a_pipelined_call_gives_none_before_it_more_time(agent: Agent, worker: WorkerHandle, process: Process) -> None:
    worker.pipelined = True
    give(worker, 1, timeout=5.0)
    agent.time = 4.0
    give(worker, 3, timeout=5.0)
    agent.time = 5.5
    agent.look()
    assert agent.signals == [signal.SIGTERM]
