"""Syncs the project's files to all nodes of a pool, so that a node has the current code before a call is sent to it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence

from skyfab._util.signals import SIGNAL_GUARD
from skyfab.calls.project import Project, Tree
from skyfab.errors import HostLost, UsageError
from skyfab.pool.futures import refuse_to_block
from skyfab.pool.node import Node
from skyfab.pool.relay import Relay
from skyfab.session.fanout import for_each_host, results_of


class ProjectSync:
    """Sends changed project files, once, to every node that is not lost. Thread-safe."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self.relay: Relay | None = None
        self._lock = threading.RLock()  # reentrant: a signal handler may make a call
        self._nodes: Sequence[Node] | None = None  # None while the pool is not open
        self.tree: Tree | None = None
        """The tree that every node has; None before the first call, and if a node may lack something."""

    def begin(self) -> None:
        """Forgets the nodes: new ones will have nothing yet."""
        with self._lock:
            self._nodes = self.tree = None

    def open(self, nodes: Sequence[Node]) -> None:
        """Calls from now on are for these nodes, those that wait since before the pool was closed included."""
        self._nodes = nodes

    def close(self) -> None:
        self._project.close()

    def read_ahead(self) -> None:
        """Reads the project while the pool connects."""
        with contextlib.suppress(OSError):  # raised again by the first call
            self._project.tree()

    def digest(self, use_tree: Callable[[str], None]) -> str:
        """Syncs every node; returns the tree's digest. `use_tree` is called with the digest if the tree is a new one.

        Raises UsageError if the pool was closed meanwhile.
        """
        tree = self._project.tree()
        if tree is self.tree:
            return tree.digest
        refuse_to_block()  # other threads wait for replies here, which the thread of a subscriber would have to read
        with self._lock:
            if self._nodes is None:
                raise UsageError("the pool was closed")
            tree = self._project.tree()  # read again: another thread may have sent a newer one meanwhile
            nodes = [node for node in self._nodes if node.lost is None]
            if self.relay is not None and len(nodes) > 1:
                self.relay.send_project(tree, nodes)
            while not all(results_of(for_each_host(functools.partial(_learns, tree), nodes))):
                tree = self._project.tree(anew=True)  # a file has changed since the tree was read
            with SIGNAL_GUARD:  # a handler may raise, or make a call that syncs a newer tree
                use_tree(tree.digest)
                self.tree = tree
        return tree.digest

    def take_back(self, node: Node, accept: Callable[[], None]) -> None:
        """Syncs a recovered node, then calls `accept`, which allows calls to it."""
        while True:
            with self._lock:  # held, so that no newer tree is sent to the others before `accept`
                tree = self.tree
                if tree is None or node.store.knows(tree):
                    accept()
                    return
            if not node.store.sync(tree):  # a file has changed: the next call reads again
                with self._lock:
                    self.tree = None


def _learns(tree: Tree, node: Node) -> bool:
    """Syncs one node. Returns False if a file has changed since the tree was read. A host lost meanwhile is skipped."""
    try:
        return node.store.sync(tree)
    except HostLost as error:
        node.note_lost(error)
        return True
