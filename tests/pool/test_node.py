"""A node, with a session that only notes what it is told: what a host is sent, and what it is not sent again."""

from __future__ import annotations

from typing import Any

import pytest
from stage.fakes import FakeNode, FakeSession

import skyfab as sky
from skyfab.calls.pack import PackedCall, PackedFunction
from skyfab.inventory.inventory import Inventory
from skyfab.pool.node import Node, Owner, WorkerSpec
from skyfab.protocol import codec, messages
from skyfab.protocol.blobs import LARGE
from skyfab.ui.events import Event, Events, HostState

PLAN = WorkerSpec(tree="", env={}, info={})


class FakeCaller:
    def __init__(self) -> None:
        self.streams: list[int] = []
        self.errors: list[Exception] = []
        self.wanted = True

    def is_wanted(self) -> bool:
        return self.wanted

    def sent(self, stream: int) -> None:
        self.streams.append(stream)

    def answered(self, message: messages.Message, buffers: list[memoryview]) -> None:
        pass

    def failed(self, error: Exception) -> None:
        self.errors.append(error)


@pytest.fixture
def node() -> Node:
    node = Node(0, sky.Host(name="node1"), Inventory.of(None), Owner(Events()))
    node.reset(FakeSession())  # type: ignore[arg-type]
    return node


@pytest.fixture
def found(node: Node) -> list[Event]:
    """The events of the node."""
    found: list[Event] = []
    node._owner.events.subscribe(found.append)
    return found


def call(
    node: Node, content: bytes, *, shared: bool = True, digest: str = "digest", plan: WorkerSpec = PLAN
) -> FakeCaller:
    caller = FakeCaller()
    function = PackedFunction(digest, codec.Payload(b"f"))
    arguments = codec.Payload(b"a", [memoryview(content)])
    node.call("solo.0", plan, packed(function, arguments), caller=caller, store="all" if shared else "repeated")
    return caller


def packed(function: PackedFunction, arguments: codec.Payload) -> PackedCall:
    return PackedCall(function=function, arguments=arguments, label="f")


def session_of(node: Node) -> Any:
    return node.session


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


# ---- what is sent once


def test_a_process_and_a_function_are_sent_before_the_first_call_only(node: Node) -> None:
    session = session_of(node)
    assert call(node, b"small").streams == [5]
    sent = messages.decode(session.sent[2])
    assert isinstance(sent, messages.Call)
    assert not sent.each
    assert session.options[1:] == [{"urgent": True}, {"worker": "solo.0"}], "a call never overtakes its function"
    assert session.ops == ["spawn", "function", "call"]
    assert session.data[1:] == [[b"f"], [b"a", b"small"]]
    call(node, b"small")
    call(node, b"small", plan=WorkerSpec(tree="", env={}, info={}))
    assert session.ops == ["call", "call"]
    call(node, b"small", plan=WorkerSpec(tree="changed", env={}, info={}))
    assert session.ops == ["spawn", "call"]


def test_a_process_that_has_exited_is_started_again(node: Node) -> None:
    session = session_of(node)
    call(node, b"")
    first = session.sent[0].generation
    node.on_exit("solo.0", first + 1)  # of one that was replaced
    node.on_exit("solo.1", first)
    session.ops.clear()
    call(node, b"")
    assert "spawn" not in session.ops
    node.on_exit("solo.0", first)
    call(node, b"")
    assert session.sent[0].generation == first + 1
    assert session.ops == ["spawn", "call"]


def test_a_process_is_ended_once(node: Node) -> None:
    session = session_of(node)
    node.release("solo.0")
    assert session.ops == []
    call(node, b"")
    session.ops.clear()
    node.release("solo.0")
    node.release("solo.0")
    assert session.ops == ["stop_worker"]
    call(node, b"")
    assert session.ops[0] == "spawn"


def test_the_function_used_longest_ago_is_forgotten_first(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyfab.pool.node._FUNCTIONS", 2)
    session = session_of(node)
    for digest in ("one", "two", "one"):
        call(node, b"", digest=digest)
    assert "forget" not in session.ops
    call(node, b"", digest="three")
    assert [each.digests for each in session.sent if isinstance(each, messages.Forget)] == [["two"]]


# ---- large arguments


def test_what_ranks_share_is_stored_once_and_calls_wait_for_it(node: Node) -> None:
    session = session_of(node)
    first, second = call(node, bytes(LARGE)), call(node, bytes(LARGE))
    assert session.ops == ["blob"]
    assert first.streams == second.streams == []
    session.answers[0](messages.Done(), [])
    assert len(first.streams) == len(second.streams) == 1
    assert session.ops == ["spawn", "function", "call", "call"]
    assert session.data[-1] == [b"a"], "only its name is in the call"
    call(node, bytes(LARGE))
    assert session.ops == ["call"]


def test_a_large_argument_of_one_call_travels_with_it_and_is_stored_when_it_comes_again(node: Node) -> None:
    session = session_of(node)
    call(node, bytes(LARGE), shared=False)
    assert session.ops == ["spawn", "function", "call"]
    call(node, bytes(LARGE), shared=False)
    assert session.ops == ["blob"]
    call(node, b"x" * LARGE, shared=False)
    assert session.ops == ["call"], "one of the same size is another"
    call(node, bytes(LARGE - 1))
    assert session.ops == ["call"], "and this one is not large"


def test_a_host_that_cannot_store_an_argument_fails_its_call_once(node: Node) -> None:
    session, caller = session_of(node), FakeCaller()
    arguments = codec.Payload(b"a", [memoryview(bytes([each]) * LARGE) for each in (1, 2)])
    function = PackedFunction("d", codec.Payload(b"f"))
    node.call("solo.0", PLAN, packed(function, arguments), caller=caller, store="all")
    first, second = session.answers
    first(messages.Failed(text="its disk is full", hint="make room"), [])
    second(messages.Failed(text="its disk is full", hint="make room"), [])
    assert [(type(error), error.hint) for error in caller.errors] == [(sky.HostUnfit, "make room")]  # type: ignore[attr-defined]
    assert caller.streams == []


def test_a_host_that_is_lost_meanwhile_fails_the_call(node: Node) -> None:
    session, caller = session_of(node), call(node, bytes(LARGE))
    session.is_gone = True
    session.answers[0](messages.Done(), [])
    assert [type(error) for error in caller.errors] == [sky.HostLost]
    other = call(node, b"x" * LARGE)
    assert [type(error) for error in other.errors] == [sky.HostLost]
    assert node.store._coming == {}


def test_a_call_that_was_cancelled_while_its_arguments_travelled_is_not_sent(node: Node) -> None:
    session, caller = session_of(node), call(node, bytes(LARGE))
    caller.wanted = False
    session.ops.clear()
    session.answers[0](messages.Done(), [])
    assert session.ops == []
    assert [type(error) for error in caller.errors] == [sky.CallCancelled]


# ---- the project


class FakeTree:
    digest = "tree"
    files = (("a.py", "blob1"), ("b.py", "blob2"))
    sources = ("blob1", "blob2")

    def __init__(self) -> None:
        self.contents: dict[str, bytes | None] = {"blob1": b"1", "blob2": b"2"}

    def content(self, name: str) -> bytes | None:
        return self.contents[name]


def test_a_project_is_sent_once_and_only_what_is_missing(node: Node) -> None:
    session, tree = session_of(node), FakeTree()
    session.missing = ["blob2", "never offered"]
    assert not node.store.knows(tree)  # type: ignore[arg-type]
    assert node.store.sync(tree)  # type: ignore[arg-type]
    assert [(each.name, each.keep) for each in session.sent] == [("blob2", True)]
    assert [type(each) for each in session.asked] == [messages.Has, messages.Tree]
    assert session.asked[1].files == [["a.py", "blob1"], ["b.py", "blob2"]]
    assert node.store.knows(tree)  # type: ignore[arg-type]
    assert node.store.sync(tree)  # type: ignore[arg-type]
    assert len(session.asked) == 2


def test_a_file_that_is_on_its_way_is_not_sent_twice(node: Node) -> None:
    session, tree = session_of(node), FakeTree()
    session.missing = ["blob1"]
    node.store._coming["blob1"] = []
    node.store.send("blob1", b"1", keep=True)
    session.ops.clear()
    assert node.store.sync(tree)  # type: ignore[arg-type]
    assert session.ops == []


# ---- the host


def test_a_host_is_lost_for_the_first_reason_and_only_when_its_session_has_ended(node: Node) -> None:
    error = sky.HostLost("gone", host="node1")
    node.note_lost(error)
    assert node.lost is None, "it was about a session before"
    session_of(node).has_ended = True
    node.note_lost(error)
    node.note_lost(sky.HostLost("later", host="node1"))
    assert repr(node.lost) == repr(error)


# ---- events


@pytest.mark.parametrize(
    ("others", "ours"),
    [([], False), (["responds"], False), (["silent"], True), (["lost"], False), (["silent", "responds"], False)],
)
def test_where_no_host_answers_the_network_here_is_suspected(
    node: Any, found: list[Event], others: list[str], ours: bool
) -> None:
    nodes: list[Any] = [node]
    for number, how in enumerate(others, 1):
        other = FakeNode(number)
        other.session.responds = how == "responds"
        other.lost = sky.HostLost("gone") if how == "lost" else None
        nodes.append(other)
    node._owner.nodes = nodes
    node.on_disconnect("no heartbeat")
    (state,) = found
    assert isinstance(state, HostState)
    assert state.state == "reconnecting"
    assert state.detail.startswith("no heartbeat")
    assert ("is your network up" in state.detail) is ours
    assert state.limit == (10 if "responds" in others else 60)


def test_a_host_that_is_back_is_told(node: Any, found: list[Event]) -> None:
    node.on_reconnect(2.04)
    assert found == [HostState(host="node1", state="ready", detail="back after 2.0 s")]
