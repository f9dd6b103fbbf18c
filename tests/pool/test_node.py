"""A node, with a session that only notes what it is told: what becomes of uploads when its agent is replaced."""

from __future__ import annotations

from typing import Any

import pytest

import skyfab as sky
from skyfab.calls.pack import PackedFunction
from skyfab.inventory.inventory import Inventory
from skyfab.pool.node import Node, WorkerSpec
from skyfab.pool.nodes import _NoOwner
from skyfab.protocol import codec, messages
from skyfab.protocol.blobs import LARGE

PLAN = WorkerSpec(tree="", env={}, info={})


class FakeSession:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.failures: list[Any] = []
        self.answers: list[Any] = []

    def send(self, message: Any, parts: Any = (), *, answer: Any = None, failure: Any = None, **_: Any) -> int:
        self.sent.append(message)
        self.answers.append(answer)
        self.failures.append(failure)
        return 2 * len(self.sent) - 1


class FakeCaller:
    def __init__(self) -> None:
        self.streams: list[int] = []
        self.errors: list[Exception] = []

    def is_wanted(self) -> bool:
        return True

    def sent(self, stream: int) -> None:
        self.streams.append(stream)

    def answered(self, message: messages.Message, buffers: list[memoryview]) -> None:
        pass

    def failed(self, error: Exception) -> None:
        self.errors.append(error)


@pytest.fixture
def node() -> Node:
    node = Node(0, sky.Host(name="node1"), Inventory.of(None), _NoOwner())
    node.session = FakeSession()  # type: ignore[assignment]
    return node


def call(node: Node, content: bytes) -> FakeCaller:
    caller = FakeCaller()
    function = PackedFunction("digest", codec.Payload(b"f"))
    arguments = codec.Payload(b"a", [memoryview(content)])
    node.call("solo.0", PLAN, function, arguments, timeout=None, caller=caller, shared=True)
    return caller


def test_a_call_whose_argument_was_on_its_way_to_an_agent_that_is_replaced_fails(node: Node) -> None:
    """Nothing else would ever end it."""
    caller = call(node, bytes(LARGE))
    node.reset(FakeSession())  # type: ignore[arg-type]
    assert [type(error) for error in caller.errors] == [sky.HostLost]


def test_what_an_agent_says_late_does_not_fail_an_upload_to_its_successor(node: Node) -> None:
    before: Any = node.session
    call(node, bytes(LARGE))
    node.reset(FakeSession())  # type: ignore[arg-type]
    after: Any = node.session
    caller = call(node, bytes(LARGE))
    before.failures[0](sky.HostLost("late", host="node1"))
    assert caller.errors == []
    after.answers[0](messages.Done(), [])
    assert len(caller.streams) == 1


def test_samples_of_large_arguments_are_remembered_up_to_a_number(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyfab.pool.node._SAMPLES", 3)
    for number in range(10):
        node._belongs_in_store(memoryview(bytes([number]) * LARGE), False)
    assert len(node._seen) == 3
    assert node._belongs_in_store(memoryview(bytes([9]) * LARGE), False), "and the last ones are known again"
