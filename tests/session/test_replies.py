"""Replies: what a host sends goes to the request that waits for it, after the lines of its worker."""

from __future__ import annotations

from typing import Any

import pytest
from stage.messages import filled

import skyfab as sky
from skyfab.protocol import VERSION, messages
from skyfab.session import replies as module
from skyfab.session.replies import PendingRequest, Replies, Reply


class Listener:
    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def on_output(self, worker: str, lines: Any) -> None:
        self.told += [(worker, lines.stream, text) for text, _ in lines]

    def on_import(self, worker: str, module: str) -> None:
        self.told.append(("import", worker, module))

    def on_exit(self, worker: str, generation: int) -> None:
        self.told.append(("exit", worker, generation))

    def on_lost(self, error: Exception) -> None:
        self.told.append(("lost", error))


class Stage:
    def __init__(self) -> None:
        self.listener = Listener()
        self.replies = Replies("node1", self.listener, lambda: 0.0)  # type: ignore[arg-type]
        self.forgotten: list[int] = []
        self.used: list[tuple[int, int]] = []
        self.replies.mux.forget = self.forgotten.append  # type: ignore[method-assign]
        self.replies.mux.used = lambda stream, length: self.used.append((stream, length))  # type: ignore[method-assign]

    def expect(self, stream: int, worker: str | None = None) -> list[Any]:
        """A request; the list gets its answer or failure."""
        found: list[Any] = []
        self.replies.pending[stream] = PendingRequest(
            lambda message, buffers: found.append((message, [bytes(each) for each in buffers])), found.append, worker
        )
        return found

    def opened(self, stream: int, message: messages.Message, data: bytes | None = b"") -> None:
        self.replies.opened(stream, message.encode(), None if data is None else memoryview(data))
        self.act()

    def data(self, stream: int, content: bytes) -> None:
        view = self.replies.place(stream, len(content))
        view[:] = content
        self.replies.data(stream, view)
        self.act()

    def act(self) -> None:
        for action in self.replies.take():
            action()

    def log(self, stream: int, worker: str, fd: int = 1) -> None:
        self.opened(stream, filled(messages.Log, worker=worker, fd=fd), None)

    def exited(self, worker: str, generation: int = 1) -> None:
        self.opened(0, filled(messages.Exited, worker=worker, generation=generation))


@pytest.fixture
def stage() -> Stage:
    return Stage()


# ---- answers


def test_a_small_answer_goes_to_its_request(stage: Stage) -> None:
    found, other = stage.expect(1), stage.expect(3)
    stage.opened(1, messages.Result(parts=[1, 2]), b"abb")
    ((message, buffers),) = found
    assert isinstance(message, messages.Result)
    assert buffers == [b"a", b"bb"]
    assert other == []
    assert list(stage.replies.pending) == [3]
    assert stage.forgotten == [1]
    assert stage.replies.take() == []


def test_a_large_answer_is_there_when_its_last_byte_is(stage: Stage) -> None:
    found = stage.expect(1)
    stage.opened(1, messages.Result(parts=[3, 2]), None)
    stage.data(1, b"ab")
    stage.data(1, b"c")
    assert found == []
    stage.data(1, b"de")
    assert found[0][1] == [b"abc", b"de"]
    assert stage.used == [(1, 2), (1, 1), (1, 2)]
    assert stage.replies.pending == {}


def test_data_before_its_message_is_refused_and_data_for_nobody_is_dropped(stage: Stage) -> None:
    stage.expect(1)
    stage.data(3, b"for nobody")
    with pytest.raises(sky.ProtocolError, match="data before"):
        stage.data(1, b"early")
    assert stage.used == []


def test_the_end_fails_every_request_after_the_host_is_lost(stage: Stage) -> None:
    first, second = stage.expect(1), stage.expect(3)
    error = sky.HostLost("gone", host="node1")
    stage.replies.end(error, lost=error)
    actions = stage.replies.take()
    actions[0]()
    assert stage.listener.told == [("lost", error)]
    assert first == []
    for action in actions[1:]:
        action()
    assert list(map(repr, [*first, *second])) == [repr(error)] * 2
    assert first[0] is not second[0], "each is raised on its own"
    assert stage.replies.pending == {}
    stage.replies.end(error, lost=None)
    assert stage.replies.take() == []


def test_a_reply_is_there_once_it_was_received_or_never_will_be() -> None:
    found: list[bool] = []
    first, second = (Reply(lambda: found.append(True)) for _ in range(2))
    for reply in (first, second):
        assert not reply.is_there
        assert reply.stream == 0
        reply.sent(5)
        assert reply.stream == 5
    first.answered(messages.Done(), [])
    second.failed(sky.HostLost("gone", host="node1"))
    assert first.is_there and second.is_there and found == [True, True]
    assert first.wait() == (messages.Done(), [])
    with pytest.raises(sky.HostLost, match="gone"):
        second.wait()


# ---- hello


def hello(**changes: Any) -> bytes:
    about = {"protocol": VERSION, "address": "192.0.2.1", "gpus": 0, "received": 0, **changes}
    return filled(messages.AgentHello, **about).encode()


@pytest.mark.parametrize(
    "changes",
    [
        *({"gpus": -1}, {"gpus": 1025}, {"gpus": 10**30}, {"address": "10.0.0.1; true"}, {"address": ""}),
        *({"address": "node1"}, {"address": "10.0.0.1 -j ACCEPT\n"}),
        *({"address": "fe80::1%a b"}, {"address": "fe80::1%$(x)"}),
    ],
)
def test_impossible_facts_are_refused(stage: Stage, changes: dict[str, Any]) -> None:
    with pytest.raises(sky.ProtocolError, match="invalid address or number of GPUs"):
        stage.replies.hello(hello(**changes))
    assert stage.replies.agent is None
    assert stage.replies.hellos == 0


@pytest.mark.parametrize("changes", [{}, {"gpus": 1024}, {"address": "2001:db8::1"}, {"address": "fe80::1%eth0.1-a"}])
def test_possible_facts_are_kept(stage: Stage, changes: dict[str, Any]) -> None:
    stage.replies.hello(hello(**changes))
    assert stage.replies.agent is not None
    assert stage.replies.hellos == 1
    with pytest.raises(sky.ProtocolError, match="invalid address or number"):  # that of the next connection too
        stage.replies.hello(hello(gpus=-1))


# ---- output


def test_lines_go_to_the_listener_and_credit_back_to_the_host(stage: Stage) -> None:
    stage.log(2, "solo.0")
    stage.log(4, "solo.0", fd=2)
    stage.data(2, b"one\ntw")
    stage.data(4, b"error\n")
    stage.data(2, b"o\n")
    assert stage.listener.told == [
        *(("solo.0", "stdout", "one"), ("solo.0", "stderr", "error"), ("solo.0", "stdout", "two"))
    ]
    assert stage.used == [(2, 6), (4, 6), (2, 2)]


def test_the_incomplete_line_of_a_call_comes_before_its_answer(stage: Stage) -> None:
    found = stage.expect(1, "solo.0")
    for stream, worker in ((2, "solo.0"), (4, "solo.1")):
        stage.log(stream, worker)
        stage.data(stream, b"no end")
    stage.replies.opened(1, messages.Result(parts=[1]).encode(), memoryview(b"a"))
    stage.replies.take()[0]()
    assert stage.listener.told == [("solo.0", "stdout", "no end")]
    assert found == []
    stage.exited("solo.0", 5)
    stage.exited("solo.1", 6)
    assert stage.listener.told[1:] == [*(("exit", "solo.0", 5), ("solo.1", "stdout", "no end"), ("exit", "solo.1", 6))]


def test_what_a_process_wrote_last_may_come_after_its_exit(stage: Stage) -> None:
    stage.log(2, "solo.0")
    stage.exited("solo.0")
    stage.data(2, b"late\n")
    assert ("solo.0", "stdout", "late") in stage.listener.told


def test_the_last_line_of_a_process_needs_no_end_of_line(stage: Stage) -> None:
    """Its exit overtakes what it has written; the end of its output is told behind that."""
    stage.log(2, "solo.0")
    stage.exited("solo.0", 1)
    stage.data(2, b"first\nunfin")
    stage.data(2, b"ished")
    assert stage.listener.told == [("exit", "solo.0", 1), ("solo.0", "stdout", "first")]
    stage.data(2, b"")
    stage.data(2, b"")
    assert stage.listener.told[2:] == [("solo.0", "stdout", "unfinished")]


def test_the_next_process_of_a_worker_takes_the_place_of_the_last(stage: Stage) -> None:
    stage.log(2, "solo.0")
    stage.log(4, "solo.0", fd=2)
    stage.log(6, "solo.0")
    assert stage.forgotten == [2]
    stage.data(2, b"dropped\n")
    stage.data(4, b"kept\n")
    assert stage.listener.told == [("solo.0", "stderr", "kept")]
    stage.log(4, "solo.1")
    assert stage.forgotten == [2, 4], "its number is another's"


def test_output_of_processes_that_ended_is_kept_up_to_a_number(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_ENDED", 2)
    for number in range(4):
        stage.log(2 * number, f"solo.{number}")
        stage.exited(f"solo.{number}")
    for number in range(4):
        stage.exited(f"solo.{number}")
    assert stage.forgotten == [0, 2], "an exit that is reported twice changes nothing"


def test_more_output_than_any_pool_has_is_refused(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_OUTPUTS", 2)
    for number in range(4):
        stage.log(2 * number, f"solo.{number}")
        stage.exited(f"solo.{number}")
    stage.log(20, "a")
    stage.log(22, "b")
    with pytest.raises(sky.ProtocolError, match="more than 2 output streams"):
        stage.log(24, "c")
