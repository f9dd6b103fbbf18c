"""The fast path against a scheduler and a host that only note what they are told: a slot is always released."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import skyfab as sky
from skyfab.calls.pack import PackedFunction
from skyfab.pool.fastpath import NOT_TAKEN, fastpath
from skyfab.protocol import codec, messages
from skyfab.protocol.mux import SMALL
from skyfab.session.replies import Reply

GONE = sky.HostLost("gone", host="node1")


class Stage:
    """A pool of one worker, which replies as the test says."""

    def __init__(self) -> None:
        self.reply = Reply(5, "solo.0")
        self.comes: Any = lambda: None
        self.released = 0
        self.cancelled: list[int] = []
        self.events: list[object] = []
        self.begun: list[tuple[Any, ...]] = []
        self.untrusted = False
        node = SimpleNamespace(
            name="node1", begin=self._begin, cancel=self._cancel, session=SimpleNamespace(await_reply=self._await)
        )
        self.slot: Any = SimpleNamespace(node=node, worker="solo.0", plan="plan")
        self.begin_error: Exception | None = None
        self.cancel_error: Exception | None = None

    def _begin(self, *rest: Any, timeout: float | None) -> Reply:
        if self.begin_error is not None:
            raise self.begin_error
        self.begun.append((*rest, timeout))
        return self.reply

    def _await(self, reply: Reply) -> None:
        assert reply is self.reply
        assert self.released == 0
        self.comes()

    def _cancel(self, stream: int) -> None:
        self.cancelled.append(stream)
        if self.cancel_error is not None:
            raise self.cancel_error

    # ---- the scheduler

    def reserve(self) -> Any:
        return self.slot

    def release(self, slot: Any) -> None:
        assert slot is self.slot
        self.released += 1

    def started(self, label: str, host: str) -> Any:
        self.events.append((label, host))
        return self.events.append

    # ---- the call

    def call(self, data: bytes = b"data", buffers: Any = (), function: Any = ()) -> Any:
        packed = PackedFunction("digest", codec.Payload(b"f", function))
        return fastpath(self, packed, codec.Payload(data, buffers), label="f", timeout=3.0)  # type: ignore[arg-type]

    def value(self, value: object) -> None:
        self.reply.value = codec.dumps(value).data


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_the_result_is_returned_and_the_slot_released(stage: Stage) -> None:
    stage.comes = lambda: stage.value([1, 2])
    assert stage.call() == [1, 2]
    assert stage.released == 1
    assert stage.events == [("f", "node1"), None]
    (begun,) = stage.begun
    assert begun[:2] == ("solo.0", "plan")
    assert begun[3:] == (b"data", 3.0)


@pytest.mark.parametrize(
    ("data", "buffers", "function", "taken"),
    [
        (bytes(SMALL), (), (), True),
        (bytes(SMALL + 1), (), (), False),
        (b"", [memoryview(b"x")], (), False),
        (b"", (), [memoryview(b"x")], False),
    ],
)
def test_only_small_calls_go_this_way(stage: Stage, data: bytes, buffers: Any, function: Any, taken: bool) -> None:
    stage.comes = lambda: stage.value(1)
    assert (stage.call(data, buffers, function) is not NOT_TAKEN) is taken
    assert stage.released == len(stage.begun) == taken


def test_where_no_worker_is_idle_the_call_is_not_taken(stage: Stage) -> None:
    stage.slot = None
    assert stage.call() is NOT_TAKEN
    assert stage.events == []


def test_a_worker_that_exited_before_it_began_leaves_the_call_to_the_scheduler(stage: Stage) -> None:
    stage.comes = lambda: stage.reply.answer(messages.Ended(why="unstarted"), [])
    assert stage.call() is NOT_TAKEN
    assert stage.released == 1
    assert isinstance(stage.events[1], sky.CallCancelled)


def test_what_the_call_raised_is_raised_and_told(stage: Stage) -> None:
    stage.comes = lambda: stage.reply.answer(messages.Ended(why="died", text="killed"), [])
    with pytest.raises(sky.WorkerDied) as raised:
        stage.call()
    assert stage.events[1] is raised.value
    assert stage.released == 1


def test_untrusted_hosts_return_plain_data_only(stage: Stage) -> None:
    stage.untrusted = True
    stage.comes = lambda: stage.value(object())
    with pytest.raises(sky.UntrustedResult):
        stage.call()


def test_a_host_that_is_lost_before_the_call_is_sent_frees_the_slot(stage: Stage) -> None:
    stage.begin_error = GONE
    with pytest.raises(sky.HostLost):
        stage.call()
    assert stage.released == 1
    assert stage.events[1] is GONE
    assert stage.cancelled == []


def test_a_host_that_is_lost_meanwhile_frees_the_slot_at_once(stage: Stage) -> None:
    def lost() -> None:
        stage.reply.failure(GONE)
        raise GONE

    stage.comes = lost
    with pytest.raises(sky.HostLost):
        stage.call()
    assert stage.released == 1
    assert stage.cancelled == []


@pytest.mark.parametrize("error", [None, GONE])
def test_ctrl_c_cancels_the_call_and_frees_the_slot_when_it_has_ended(stage: Stage, error: Exception | None) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    stage.comes, stage.cancel_error = interrupted, error
    with pytest.raises(KeyboardInterrupt):
        stage.call()
    assert stage.cancelled == [5]
    assert stage.released == 0
    assert isinstance(stage.events[1], sky.CallCancelled)
    stage.reply.answer(messages.Ended(why="cancelled"), [])
    assert stage.released == 1
