"""The fast path against a host that only notes what it is told: a slot is always released."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import skyfab as sky
from skyfab.calls.pack import PackedCall, PackedFunction
from skyfab.pool.scheduler import NOT_TAKEN, Scheduler
from skyfab.protocol import codec, messages
from skyfab.protocol.mux import SMALL
from skyfab.session.replies import Reply

GONE = sky.HostLost("gone", host="node1")


class Stage:
    """A pool of one worker, which replies as the test says."""

    def __init__(self, *, untrusted: bool = False) -> None:
        self.reply = Reply(5, "solo.0")
        self.comes: Any = lambda: None
        self.cancelled: list[int] = []
        self.events: list[object] = []
        self.begun: list[tuple[Any, ...]] = []
        node: Any = SimpleNamespace(
            name="node1",
            host=sky.Host(name="node1"),
            lost=None,
            begin=self._begin,
            cancel=self._cancel,
            session=SimpleNamespace(await_reply=self._await),
        )
        self.scheduler = Scheduler(self._started, untrusted=untrusted)
        self.scheduler.open([node], lambda node, tree: "plan")  # type: ignore[arg-type,return-value]
        self.begin_error: Exception | None = None
        self.cancel_error: Exception | None = None

    @property
    def is_free(self) -> bool:
        return not self.scheduler._slots[0].tasks

    def _begin(self, *rest: Any) -> Reply:
        if self.begin_error is not None:
            raise self.begin_error
        self.begun.append(rest)
        return self.reply

    def _await(self, reply: Reply) -> None:
        assert reply is self.reply
        assert not self.is_free
        self.comes()

    def _cancel(self, stream: int) -> None:
        self.cancelled.append(stream)
        if self.cancel_error is not None:
            raise self.cancel_error

    def _started(self, label: str, host: str) -> Any:
        self.events.append((label, host))
        return self.events.append

    def call(self, data: bytes = b"data", buffers: Any = (), function: Any = (), **options: Any) -> Any:
        packed = PackedFunction("digest", codec.Payload(b"f", function))
        arguments = codec.Payload(data, buffers)
        return self.scheduler.run(PackedCall(function=packed, arguments=arguments, label="f", **options))

    def value(self, value: object) -> None:
        self.reply.value = codec.dumps(value).data


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_the_result_is_returned_and_the_slot_released(stage: Stage) -> None:
    stage.comes = lambda: stage.value([1, 2])
    assert stage.call() == [1, 2]
    assert stage.is_free
    assert stage.events == [("f", "node1"), None]
    ((*where, call),) = stage.begun
    assert where == ["solo.0", "plan"]
    assert call.arguments.data == b"data"


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
    assert stage.is_free
    assert len(stage.begun) == taken


@pytest.mark.parametrize("options", [{"retries": 1}, {"stall": 3.0}])
def test_calls_that_are_watched_or_retried_go_the_general_way(stage: Stage, options: dict[str, Any]) -> None:
    assert stage.call(**options) is NOT_TAKEN
    assert stage.begun == []


def test_where_no_worker_is_idle_the_call_is_not_taken(stage: Stage) -> None:
    assert stage.scheduler._reserve() is not None
    assert stage.call() is NOT_TAKEN
    assert stage.events == []


def test_a_worker_that_exited_before_it_began_leaves_the_call_to_the_scheduler(stage: Stage) -> None:
    stage.comes = lambda: stage.reply.answer(messages.Ended(why="unstarted"), [])
    assert stage.call() is NOT_TAKEN
    assert stage.is_free
    assert isinstance(stage.events[1], sky.CallCancelled)


def test_what_the_call_raised_is_raised_and_told(stage: Stage) -> None:
    stage.comes = lambda: stage.reply.answer(messages.Ended(why="died", text="killed"), [])
    with pytest.raises(sky.WorkerDied) as raised:
        stage.call()
    assert stage.events[1] is raised.value
    assert stage.is_free


def test_untrusted_hosts_return_plain_data_only() -> None:
    stage = Stage(untrusted=True)
    stage.comes = lambda: stage.value(object())
    with pytest.raises(sky.UntrustedResult):
        stage.call()


def test_a_host_that_is_lost_before_the_call_is_sent_frees_the_slot(stage: Stage) -> None:
    stage.begin_error = GONE
    with pytest.raises(sky.HostLost):
        stage.call()
    assert stage.is_free
    assert stage.events[1] is GONE
    assert stage.cancelled == []


def test_a_host_that_is_lost_meanwhile_frees_the_slot_at_once(stage: Stage) -> None:
    def lost() -> None:
        stage.reply.failure(GONE)
        raise GONE

    stage.comes = lost
    with pytest.raises(sky.HostLost):
        stage.call()
    assert stage.is_free
    assert stage.cancelled == []


@pytest.mark.parametrize("error", [None, GONE])
def test_ctrl_c_cancels_the_call_and_frees_the_slot_when_it_has_ended(stage: Stage, error: Exception | None) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    stage.comes, stage.cancel_error = interrupted, error
    with pytest.raises(KeyboardInterrupt):
        stage.call()
    assert stage.cancelled == [5]
    assert not stage.is_free
    assert isinstance(stage.events[1], sky.CallCancelled)
    stage.reply.answer(messages.Ended(why="cancelled"), [])
    assert stage.is_free
