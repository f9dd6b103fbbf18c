"""The nodes of a pool without hosts: what becomes of their events, and of failures when they are opened."""

from __future__ import annotations

import resource
from types import SimpleNamespace
from typing import Any

import pytest

import skyfab as sky
from skyfab.pool import nodes as module
from skyfab.pool.node import Node
from skyfab.pool.nodes import Nodes, PoolOwner, _NoOwner, close_all, make_room, open_all
from skyfab.session.lines import Lines
from skyfab.session.timing import Timing
from skyfab.ui.events import Event, Events, HostState, Output


class FakeSession:
    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.responds = True
        self.closed = False
        self.was_stopped = False
        self.connection = SimpleNamespace(timing=Timing(lease=60, heartbeat_timeout=10))

    def open(self) -> Any:
        if self.error is not None:
            raise self.error
        return SimpleNamespace(python="3.12.1")


class FakeNode:
    def __init__(self, index: int = 0, error: BaseException | None = None) -> None:
        self.index, self.name = index, f"node{index}"
        self.lost: Exception | None = None
        self.session = FakeSession(error)

    def close(self) -> None:
        self.session.closed = True


class Stage:
    """An owner, and all that it tells."""

    def __init__(self, *, recovers: bool = True) -> None:
        self.found: list[Event] = []
        self.exits: list[tuple[Any, str]] = []
        self.expected: list[Any] = []
        self.advanced = 0
        gangs: Any = SimpleNamespace(
            rank_of=lambda node, worker: 3, worker_exited=lambda node, worker: self.exits.append((node, worker))
        )
        self.events = Events()
        self.unsubscribe = self.events.subscribe(self.found.append)
        self.owner = PoolOwner(self.events, gangs, SimpleNamespace(advance=self._advance))  # type: ignore[arg-type]
        if recovers:
            self.owner.recovery = SimpleNamespace(expect=lambda *rest: self.expected.append(rest))  # type: ignore[assignment]

    def _advance(self) -> None:
        self.advanced += 1


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture(autouse=True)
def fake_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Node, "close", lambda node: node.close())


# ---- events


def test_output_has_the_rank_of_its_process(stage: Stage) -> None:
    lines = Lines("stderr", [("one", "\n"), ("two", "\r")])
    stage.owner.on_output(FakeNode(), "gang1.0", lines)  # type: ignore[arg-type]
    common: dict[str, Any] = {"host": "node0", "rank": 3, "stream": "stderr"}
    assert stage.found == [Output(**common, text="one"), Output(**common, text="two", end="\r")]


def test_output_that_nobody_wants_is_dropped(stage: Stage) -> None:
    stage.unsubscribe()
    stage.owner._gang_cache.rank_of = lambda node, worker: pytest.fail("asked")  # type: ignore[method-assign]
    stage.owner.on_output(FakeNode(), "gang1.0", Lines("stdout", [("one", "\n")]))  # type: ignore[arg-type]


def test_the_gang_is_told_when_a_member_exits(stage: Stage) -> None:
    node: Any = FakeNode()
    stage.owner.on_exit(node, "gang1.0")
    assert stage.exits == [(node, "gang1.0")]


def test_a_lost_host_is_waited_for_and_its_calls_move(stage: Stage) -> None:
    node: Any = FakeNode()
    error = sky.HostLost("gone", host="node0")
    stage.owner.on_lost(node, error)
    assert stage.expected == [(node, error)]
    assert stage.found == [HostState(host="node0", state="lost", detail="gone")]
    assert stage.advanced == 1


def test_a_host_that_is_none_of_ours_is_not_waited_for(stage: Stage) -> None:
    node: Any = FakeNode()
    error = sky.HostLost("gone", host="node0")
    error.__cause__ = sky.ProtocolError("rubbish")
    stage.owner.on_lost(node, error)
    assert stage.expected == []
    assert node.lost is error
    assert stage.advanced == 1


def test_a_host_is_lost_before_there_is_a_recovery() -> None:
    node: Any = FakeNode()
    error = sky.HostLost("gone", host="node0")
    Stage(recovers=False).owner.on_lost(node, error)
    assert node.lost is error


@pytest.mark.parametrize(
    ("others", "ours"),
    [([], False), (["responds"], False), (["silent"], True), (["lost"], False), (["silent", "responds"], False)],
)
def test_where_no_host_answers_the_network_here_is_suspected(stage: Stage, others: list[str], ours: bool) -> None:
    node = FakeNode(0)
    stage.owner.nodes = [node]  # type: ignore[list-item]
    for number, how in enumerate(others, 1):
        other = FakeNode(number)
        other.session.responds = how == "responds"
        other.lost = sky.HostLost("gone") if how == "lost" else None
        stage.owner.nodes.append(other)  # type: ignore[attr-defined]
    stage.owner.on_disconnect(node, "no heartbeat")  # type: ignore[arg-type]
    (found,) = stage.found
    assert isinstance(found, HostState)
    assert found.state == "reconnecting"
    assert found.detail.startswith("no heartbeat")
    assert ("this machine's network" in found.detail) is ours
    assert found.limit == (10 if "responds" in others else 60)


def test_a_host_that_is_back_is_told(stage: Stage) -> None:
    stage.owner.on_reconnect(FakeNode(), 2.04)  # type: ignore[arg-type]
    assert stage.found == [HostState(host="node0", state="ready", detail="back after 2.0 s")]


def test_a_host_of_a_detached_run_is_lost_and_that_is_all() -> None:
    node: Any = FakeNode()
    error = sky.HostLost("gone")
    _NoOwner().on_lost(node, error)
    assert node.lost is error
    assert not _NoOwner().others_respond(node)


# ---- making


class Images:
    """Notes for which sessions an interpreter is asked for."""

    def __init__(self) -> None:
        self.begun = 0
        self.sessions: list[str] = []

    def begin(self, hosts: object) -> None:
        self.begun += 1

    def interpreter(self, host: sky.Host, session: str, report: Any) -> tuple[str, None]:
        self.sessions.append(session)
        return "python3", None

    def setup(self, host: sky.Host) -> str:
        return ""


def test_each_host_gets_a_node_with_a_session_and_a_working_folder(stage: Stage) -> None:
    images, recovered = Images(), list[Any]()
    workdirs: Any = SimpleNamespace(of=lambda host: f"folder of {host.name}")
    inventory = sky.Inventory.of(None)
    nodes = Nodes(images, workdirs, Timing(lease=60), stage.owner, recovered.append)  # type: ignore[arg-type]
    assert stage.owner.recovery is nodes.recovery
    nodes.recovery.close()
    made = nodes.make_nodes([sky.Host(name="a"), sky.Host(name="b")], inventory)
    assert not nodes.recovery._over.is_set()
    assert nodes.all is made
    assert stage.owner.nodes is made
    assert images.begun == 1
    assert [(node.index, node.name, node.workdir) for node in made] == [
        (0, "a", "folder of a"),
        (1, "b", "folder of b"),
    ]
    pool = images.sessions[0].partition("-")[0]
    assert images.sessions == [f"{pool}-0", f"{pool}-1"]
    made[1].workdir = "another"  # type: ignore[assignment]
    copies = nodes.copies(made[1:])
    assert [(copy.index, copy.name, copy.workdir) for copy in copies] == [(1, "b", "another")]
    assert copies[0].session is not made[1].session
    other = images.sessions[2].partition("-")[0]
    assert images.sessions[2:] == [f"{other}-1"]
    assert other != pool
    assert nodes.all is made


# ---- opening


def opened(stage: Stage, *errors: BaseException | None) -> tuple[list[Any], list[Any]]:
    """Nodes that fail so; those whose failure was told."""
    nodes: list[Any] = [FakeNode(index, error) for index, error in enumerate(errors)]
    failed: list[Any] = []
    try:
        open_all(nodes, stage.events, failed.append)
    finally:
        stage.failed, stage.nodes = failed, nodes  # type: ignore[attr-defined]
    return nodes, failed


def test_hosts_are_opened_and_told(stage: Stage) -> None:
    nodes, failed = opened(stage, None, None)
    assert failed == []
    assert not any(node.session.closed for node in nodes)
    assert [event.state for event in stage.found[:2]] == ["connecting", "connecting"]  # type: ignore[attr-defined]
    assert {str(event) for event in stage.found[2:]} == {f"node{n}: ready (Python 3.12.1)" for n in (0, 1)}


def test_the_one_host_that_fails_is_raised_as_it_is_and_the_others_are_closed(stage: Stage) -> None:
    error = sky.HostLost("no route", host="node1")
    with pytest.raises(sky.HostLost) as raised:
        opened(stage, None, error, None)
    assert raised.value is error
    nodes: list[Any] = stage.nodes  # type: ignore[attr-defined]
    assert [node.session.closed for node in nodes] == [True, False, True]
    assert stage.failed == [nodes[1]]  # type: ignore[attr-defined]
    assert HostState(host="node1", state="failed", detail="no route") in stage.found


def test_several_hosts_that_fail_are_raised_together_in_their_order(stage: Stage) -> None:
    errors = [sky.HostLost("no route", host="node0"), None, sky.HostUnfit("old", host="node2")]
    with pytest.raises(sky.PoolError, match="2 of 3 hosts failed") as raised:
        opened(stage, *errors)
    assert list(raised.value.exceptions) == [errors[0], errors[2]]


def test_a_mistake_that_is_the_same_on_all_hosts_is_one_mistake(stage: Stage) -> None:
    same = [sky.UsageError("no such package"), sky.UsageError("no such package")]
    with pytest.raises(sky.UsageError) as raised:
        opened(stage, *same)
    assert raised.value is same[0]
    assert raised.value.host is None  # type: ignore[attr-defined]
    with pytest.raises(sky.PoolError):
        opened(stage, sky.UsageError("no such package"), sky.UsageError("another"))


def test_a_defect_is_raised_before_anything_else(stage: Stage) -> None:
    with pytest.raises(ZeroDivisionError):
        opened(stage, sky.HostUnfit("old"), ZeroDivisionError())


def test_ctrl_c_while_hosts_are_opened_closes_them_all(stage: Stage) -> None:
    with pytest.raises(KeyboardInterrupt):
        opened(stage, None, KeyboardInterrupt())
    assert all(node.session.closed for node in stage.nodes)  # type: ignore[attr-defined]


def test_an_interrupt_while_hosts_are_closed_leaves_the_rest_to_the_end_of_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(module, "atexit", SimpleNamespace(register=registered.append))
    node: Any = FakeNode()
    close_all([node])
    assert node.session.closed
    assert registered == []

    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeNode, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        close_all([node])
    assert registered == [module.end_all]


# ---- open files


@pytest.mark.parametrize(
    ("soft", "hard", "hosts", "raised_to"),
    [
        (1024, 4096, 2, None),  # 10 + 2 · 16 + 128 = 170
        (100, 4096, 2, 170),
        (100, 150, 2, 150),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 2, None),
        (170, 170, 20, 170),  # 10 + 20 · 8: just enough
    ],
)
def test_the_limit_of_open_files_is_raised_to_what_hosts_need(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, hosts: int, raised_to: int | None
) -> None:
    told = files(monkeypatch, soft, hard)
    make_room(hosts)
    assert told == ([] if raised_to is None else [(raised_to, hard)])


def test_more_hosts_than_there_may_be_open_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    files(monkeypatch, 100, 169)
    with pytest.raises(sky.UsageError, match="20 hosts need about 170 open files"):
        make_room(20)


def files(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> list[tuple[int, int]]:
    """Ten files are open; returns the limits that were set."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: told.append(limits))
    monkeypatch.setattr(module, "Path", lambda name: SimpleNamespace(iterdir=lambda: range(10)))
    return told
