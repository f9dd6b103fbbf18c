"""The project's files on all nodes: an edit counts from the next call on, and an older version never comes back."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
from stage.fakes import FakeNode
from stage.spot import until

import skyfab as sky
from skyfab.pool.project_sync import ProjectSync
from skyfab.session.reader import SharedReader


class FakeTree:
    def __init__(self, digest: str) -> None:
        self.digest = digest


class FakeProject:
    """Whose tree is what the test says."""

    def __init__(self) -> None:
        self.now = FakeTree("old")
        self.after = self.now
        """What is found when it is read anew."""
        self.is_closed = False

    def tree(self, *, anew: bool = False) -> FakeTree:
        if anew:
            self.now = self.after
        return self.now

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def project() -> FakeProject:
    return FakeProject()


@pytest.fixture
def sync(project: FakeProject) -> ProjectSync:
    return ProjectSync(project)  # type: ignore[arg-type]


def test_a_thread_that_read_an_older_version_does_not_bring_it_back(sync: ProjectSync, project: FakeProject) -> None:
    """It waits for its turn while another thread sends the newer one."""
    node, plans, begun, turn = FakeNode(), list[str](), threading.Event(), threading.Event()
    node.store.on_sync = lambda: begun.set() or turn.wait(30)
    sync.open([node])  # type: ignore[list-item]
    first = threading.Thread(target=sync.digest, args=(plans.append,))
    first.start()
    assert begun.wait(30)
    second = threading.Thread(target=sync.digest, args=(plans.append,))
    second.start()  # it has read the old one, and waits
    until(lambda: second.is_alive())
    project.now = FakeTree("new")
    third = threading.Thread(target=sync.digest, args=(plans.append,))
    third.start()
    turn.set()
    for thread in (first, second, third):
        thread.join(30)
    assert plans[0] == "old"
    assert set(plans[1:]) == {"new"}


def test_an_edit_counts_though_a_signal_has_interrupted_the_call_that_has_sent_it(
    sync: ProjectSync, project: FakeProject
) -> None:
    plans = list[str]()

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    sync.open([FakeNode()])  # type: ignore[list-item]
    sync.digest(plans.append)
    project.now = FakeTree("new")
    with pytest.raises(KeyboardInterrupt):
        sync.digest(interrupt)
    assert sync.digest(plans.append) == "new"
    assert plans == ["old", "new"]


def test_a_host_that_is_lost_while_it_is_sent_files_is_nothing_to_the_others(sync: ProjectSync) -> None:
    lost, there = FakeNode(), FakeNode()

    def vanish() -> None:
        lost.lose()
        raise sky.HostLost("gone", host="node1")

    lost.store.on_sync = vanish
    sync.open([lost, there])  # type: ignore[list-item]
    assert sync.digest(lambda digest: None) == "old"
    assert lost.lost is not None
    assert there.store.trees == {"old"}


def test_a_change_while_a_node_is_taken_back_reaches_it_before_calls_do(
    sync: ProjectSync, project: FakeProject
) -> None:
    other, back = FakeNode(), FakeNode()
    sync.open([other])  # type: ignore[list-item]
    sync.digest(lambda digest: None)
    known: list[set[str]] = []

    def edit() -> None:
        back.store.on_sync = lambda: None
        project.now = FakeTree("new")
        sync.digest(lambda digest: None)

    back.store.on_sync = edit
    sync.take_back(back, lambda: known.append(set(back.store.trees)))  # type: ignore[arg-type]
    assert known == [{"old", "new"}]


def test_the_thread_that_reads_cannot_wait_for_hosts_to_have_new_files(sync: ProjectSync, project: FakeProject) -> None:
    """A subscriber that submitted a call after an edit stopped its pool for ever."""
    node, told = FakeNode(), list[BaseException]()
    sync.open([node])  # type: ignore[list-item]
    sync.digest(lambda tree: None)
    reader, said = SharedReader(), os.pipe()

    class Subscriber:
        interval = 60.0

        def on_ready(self, fd: int) -> list[Any]:
            reader.unwatch(fd)
            return [self.submit]

        def submit(self) -> None:
            try:
                sync.digest(lambda tree: None)
                project.now = FakeTree("new")
                sync.digest(lambda tree: None)
            except sky.UsageError as error:
                told.append(error)

        def on_tick(self, now: float) -> list[Any]:
            return []

        on_wake = on_tick
        on_error = on_tick

    subscriber: Any = Subscriber()
    reader.add(subscriber)
    reader.watch(said[0], subscriber)
    os.write(said[1], b"!")
    until(lambda: bool(told))
    reader.discard(subscriber)
    reader.join(10)
    for fd in said:
        os.close(fd)
    assert "thread" in str(told[0])
    assert node.store.trees == {"old"}


def test_each_node_is_sent_a_version_once_and_lost_ones_are_not(sync: ProjectSync, project: FakeProject) -> None:
    first, second, lost = FakeNode(1), FakeNode(2), FakeNode(3)
    sent: list[str] = []
    for node in (first, second, lost):
        node.store.on_sync = lambda node=node: sent.append(node.name)  # type: ignore[misc]
    lost.lost = sky.HostLost("gone", host="node3")
    second.store.trees.add("old")
    plans = list[str]()
    sync.open([first, second, lost])  # type: ignore[list-item]
    for _ in range(2):
        assert sync.digest(plans.append) == "old"
    assert sent == ["node1"]
    assert plans == ["old"], "it is used once"
    project.now = FakeTree("new")
    assert sync.digest(plans.append) == "new"
    assert sorted(sent) == ["node1", "node1", "node2"]


def test_a_file_that_changes_while_it_is_sent_is_read_again(sync: ProjectSync, project: FakeProject) -> None:
    node, plans = FakeNode(), list[str]()
    project.after = FakeTree("newer")
    send = node.store.sync
    node.store.sync = lambda tree: tree.digest == "newer" and send(tree)  # type: ignore[method-assign]
    sync.open([node])  # type: ignore[list-item]
    assert sync.digest(plans.append) == "newer"
    assert plans == ["newer"]
    assert node.store.trees == {"newer"}


def test_a_file_that_changes_while_one_node_is_sent_it_is_sent_to_all(sync: ProjectSync, project: FakeProject) -> None:
    """Also to those that had the version before it: one that is slow must not keep others from the newest."""
    fast, slow = FakeNode(1), FakeNode(2)
    fast.store.trees.add("old")
    project.after = FakeTree("newer")
    send = slow.store.sync
    slow.store.sync = lambda tree: tree.digest == "newer" and send(tree)  # type: ignore[method-assign]
    sync.open([fast, slow])  # type: ignore[list-item]
    assert sync.digest(lambda digest: None) == "newer"
    assert "newer" in fast.store.trees & slow.store.trees
