"""The nodes of a pool without hosts: what becomes of their events, and of failures when they are opened."""

from __future__ import annotations

import resource
from types import SimpleNamespace
from typing import Any

import pytest
from stage.fakes import FakeNode, FakeSession

import skyfab as sky
from skyfab.pool import nodes as module
from skyfab.pool.node import Node, Owner
from skyfab.pool.nodes import Nodes, close_all, make_room, open_all
from skyfab.session.lines import Lines
from skyfab.session.timing import Timing
from skyfab.ui.events import Event, Events, HostState, Importing, Output


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

    def variables(self, host: sky.Host) -> dict[str, str]:
        return {"A": "b"}


class Stage:
    """The nodes of a pool, and all that they tell."""

    def __init__(self) -> None:
        self.found: list[Event] = []
        self.expected: list[Any] = []
        self.advanced = 0
        self.images = Images()
        self.events = Events()
        self.unsubscribe = self.events.subscribe(self.found.append)
        workdirs: Any = SimpleNamespace(of=lambda host: f"folder of {host.name}")
        scheduler: Any = SimpleNamespace(advance=self._advance, untrusted=False)
        sync: Any = SimpleNamespace(take_back=None)
        timing = Timing(lease=60, heartbeat_timeout=10)
        self.owner = Nodes(self.images, workdirs, timing, self.events, scheduler, sync)  # type: ignore[arg-type]
        self.owner.recovery.expect = lambda *rest: self.expected.append(rest)  # type: ignore[method-assign]

    def _advance(self) -> None:
        self.advanced += 1

    def node(self) -> Any:
        """A node of its own, with a session that only notes what it is told."""
        node: Any = Node(0, sky.Host(name="node0"), sky.Inventory(hosts={}), self.owner)
        node.session = FakeSession()
        return node


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture(autouse=True)
def fake_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Node, "close", lambda node: node.close())


# ---- events


def member(rank: int | None) -> Any:
    made: Any = SimpleNamespace(shown_rank=rank, exits=0)

    def exited() -> None:
        made.exits += 1

    made.exited = exited
    return made


def test_output_has_the_rank_of_its_process(stage: Stage) -> None:
    node = stage.node()
    node.members = {"gang1.0": member(3)}
    node.on_output("gang1.0", Lines("stderr", [("one", "\n"), ("two", "\r")]))
    node.on_output("solo.0", Lines("stdout", [("three", "\n")]))
    common: dict[str, Any] = {"host": "node0", "rank": 3, "stream": "stderr"}
    assert stage.found == [
        Output(**common, text="one"),
        Output(**common, text="two", end="\r"),
        Output(host="node0", rank=None, stream="stdout", text="three"),
    ]


def test_output_that_nobody_wants_is_dropped(stage: Stage) -> None:
    stage.unsubscribe()
    stage.node().on_output("gang1.0", Lines("stdout", [("one", "\n")]))
    assert stage.found == []


def test_imports_of_workers_that_are_there_are_told(stage: Stage) -> None:
    node = stage.node()
    node._workers["gang1.0"] = (None, 1)
    node.members = {"gang1.0": member(3)}
    node.on_import("gang1.0", "torch")
    node.on_import("gang0.0", "jax")
    assert stage.found == [Importing(host="node0", rank=3, worker="gang1.0", module="torch")]


def test_the_gang_is_told_when_a_member_exits(stage: Stage) -> None:
    node = stage.node()
    node.members = {"gang1.0": member(0), "gang1.1": member(1)}
    node.on_exit("gang1.0", 1)
    node.on_exit("solo.0", 2)
    assert [one.exits for one in node.members.values()] == [1, 0]


def test_a_lost_host_is_waited_for_and_its_calls_move(stage: Stage) -> None:
    node = stage.node()
    error = sky.HostLost("gone", host="node0")
    node.on_lost(error)
    assert stage.expected == [(node, error)]
    assert stage.found == [HostState(host="node0", state="lost", detail="gone")]
    assert stage.advanced == 1


def test_a_host_that_is_none_of_ours_is_not_waited_for(stage: Stage) -> None:
    node = stage.node()
    error = sky.HostLost("gone", host="node0")
    error.__cause__ = sky.ProtocolError("rubbish")
    node.on_lost(error)
    assert stage.expected == []
    assert node.lost is error
    assert stage.advanced == 1


@pytest.mark.parametrize(
    ("others", "ours"),
    [([], False), (["responds"], False), (["silent"], True), (["lost"], False), (["silent", "responds"], False)],
)
def test_where_no_host_answers_the_network_here_is_suspected(stage: Stage, others: list[str], ours: bool) -> None:
    node = stage.node()
    nodes: list[Any] = [node]
    for number, how in enumerate(others, 1):
        other = FakeNode(number)
        other.session.responds = how == "responds"
        other.lost = sky.HostLost("gone") if how == "lost" else None
        nodes.append(other)
    stage.owner.nodes = nodes
    node.on_disconnect("no heartbeat")
    (found,) = stage.found
    assert isinstance(found, HostState)
    assert found.state == "reconnecting"
    assert found.detail.startswith("no heartbeat")
    assert ("this machine's network" in found.detail) is ours
    assert found.limit == (10 if "responds" in others else 60)


def test_a_host_that_is_back_is_told(stage: Stage) -> None:
    stage.node().on_reconnect(2.04)
    assert stage.found == [HostState(host="node0", state="ready", detail="back after 2.0 s")]


def test_a_host_of_a_detached_run_is_lost_and_that_is_all() -> None:
    node: Any = FakeNode(0)
    error = sky.HostLost("gone")
    owner = Owner(Events())
    owner.on_lost(node, error)
    assert node.lost is error
    assert not Node(0, sky.Host(name="a"), sky.Inventory(hosts={}), owner).others_respond()


# ---- making


def test_each_host_gets_a_node_with_a_session_and_a_working_folder(stage: Stage) -> None:
    images, nodes = stage.images, stage.owner
    inventory = sky.Inventory.of(None)
    nodes.recovery.close()
    made = nodes.make_nodes([sky.Host(name="a"), sky.Host(name="b")], inventory, lambda host: pytest.fail("reached"))
    assert not nodes.recovery._over.is_set()
    assert nodes.nodes is made
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
    assert nodes.nodes is made


@pytest.mark.parametrize(("gpus", "visible"), [("auto", None), ((1, 3), "1,3")])
def test_a_solo_call_sees_a_world_of_its_own(stage: Stage, gpus: Any, visible: str | None) -> None:
    agent = SimpleNamespace(hostname="box", address="192.0.2.1")
    host = sky.Host(name="node1", gpus=gpus)
    node: Any = SimpleNamespace(index=2, agent=agent, host=host, gpus=(1, 3))
    stage.owner.nodes = [node] * 3
    spec = stage.owner.solo_spec(node, "tree")
    assert spec.tree == "tree"
    assert spec.env.get("CUDA_VISIBLE_DEVICES") == visible
    assert spec.env["A"] == "b"
    assert spec.info == {
        "node": 2,
        "total_nodes": 3,
        "hostname": "box",
        "head_addr": "192.0.2.1",
        "accelerators": 2,
        "total_accelerators": 2,
        "peers": ["192.0.2.1"],
        "job_id": stage.owner.job,
    }


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
    node: Any = FakeNode(0)
    close_all([node])
    assert node.session.closed
    assert registered == []

    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeNode, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        close_all([node])
    assert registered == [module.end_all]  # type: ignore[attr-defined]


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
