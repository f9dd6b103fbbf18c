"""The nodes of a pool without hosts: what becomes of their events, and of failures when they are opened."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stage.fakes import FakeNode, FakeSession

import skyfab as sky
from skyfab.pool.node import Node
from skyfab.pool.nodes import Nodes, make_room, named, open_all
from skyfab.session.timing import Timing
from skyfab.ui.events import Event, Events, HostState


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


class Stage:
    """The nodes of a pool, and all that they tell."""

    def __init__(self) -> None:
        self.found: list[Event] = []
        self.expected: list[Any] = []
        self.advanced = 0
        self.images = Images()
        self.events = Events()
        self.events.subscribe(self.found.append)
        workdirs: Any = SimpleNamespace(of=lambda host: f"folder of {host.name}")
        scheduler: Any = SimpleNamespace(ended=self._advance, untrusted=False)
        sync: Any = SimpleNamespace(take_back=None)
        timing = Timing(lease=60, heartbeat_timeout=10)
        self.owner = Nodes(self.images, workdirs, timing, self.events, scheduler, sync)  # type: ignore[arg-type]
        self.owner.recovery.expect = lambda *rest: self.expected.append(rest)  # type: ignore[method-assign]

    def _advance(self, _: object) -> None:
        self.advanced += 1

    def node(self) -> Any:
        """A node of its own, with a session that only notes what it is told."""
        node: Any = Node(0, sky.Host(name="node0"), sky.Inventory(hosts={}), self.owner)
        node.reset(FakeSession())
        return node


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture(autouse=True)
def fake_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Node, "close", lambda node: node.close())


# ---- events


def test_a_host_that_is_none_of_ours_is_not_waited_for(stage: Stage) -> None:
    node = stage.node()
    error = sky.HostLost("gone", host="node0")
    error.__cause__ = sky.ProtocolError("rubbish")
    node.on_lost(error)
    assert stage.expected == []
    assert node.lost is error
    assert stage.advanced == 1


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


# ---- opening


def opened(stage: Stage, *errors: BaseException | None) -> tuple[list[Any], list[Any]]:
    """Nodes that fail so; those that have been settled."""
    nodes: list[Any] = [FakeNode(index, error) for index, error in enumerate(errors)]
    settled: list[Any] = []
    try:
        open_all(nodes, stage.events, settled.append)
    finally:
        stage.settled, stage.nodes = settled, nodes  # type: ignore[attr-defined]
    return nodes, settled


def test_the_one_host_that_fails_is_raised_as_it_is_and_the_others_are_closed(stage: Stage) -> None:
    error = sky.HostLost("no route", host="node1")
    with pytest.raises(sky.HostLost) as raised:
        opened(stage, None, error, None)
    assert raised.value is error
    nodes: list[Any] = stage.nodes  # type: ignore[attr-defined]
    assert [node.session.closed for node in nodes] == [True, False, True]
    assert {*stage.settled} == {*nodes}  # type: ignore[attr-defined]
    assert HostState(host="node1", state="failed", detail="no route") in stage.found


def test_ctrl_c_while_hosts_are_opened_closes_them_all(stage: Stage) -> None:
    with pytest.raises(KeyboardInterrupt):
        opened(stage, None, KeyboardInterrupt())
    assert all(node.session.closed for node in stage.nodes)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("soft", "hard", "hosts", "changed"),
    [
        (20, 10_000, 1, [(16 + 128, 10_000)]),
        (16 + 128, 10_000, 1, []),
        (20, 200 * 8, 200, [(200 * 8, 200 * 8)]),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 200, []),
    ],
)
def test_open_files_are_allowed_for_the_hosts(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, hosts: int, changed: list[tuple[int, int]]
) -> None:
    """In addition to those that are open. A limit is never lowered."""
    used, limits = len(list(Path("/dev/fd").iterdir())), list[Any]()
    given = tuple(limit if limit == resource.RLIM_INFINITY else used + limit for limit in (soft, hard))
    monkeypatch.setattr(resource, "getrlimit", lambda which: given)
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: limits.append(both))
    make_room(hosts)
    assert limits == [(used + one, used + other) for one, other in changed]


def test_more_hosts_than_the_system_has_files_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 1024))
    with pytest.raises(sky.UsageError, match=r"200 hosts need about .* but the limit is 1024") as raised:
        make_room(200)
    assert "ulimit" in str(raised.value.hint)


# ---- open


def test_a_host_is_chosen_by_its_name_or_as_the_first() -> None:
    nodes: list[Any] = [FakeNode(0), FakeNode(1)]
    assert [named(nodes, name).index for name in ("one", "head", "node0", "node1")] == [0, 0, 0, 1]
    for name, message in (("all", "is not one host"), ("node7", "no host 'node7' in this pool")):
        with pytest.raises(sky.UsageError, match=message) as raised:
            named(nodes, name)
        assert "node0, node1" in str(raised.value.hint)
