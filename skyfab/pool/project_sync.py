"""Keeps the project's files on all nodes of a pool the same: a node has them before a call goes there."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from skyfab.calls.project import Project, Tree
from skyfab.errors import HostLost, UsageError
from skyfab.pool.node import Node


class ProjectSync:
    """Sends what has changed of a project, once, to every node that is there. Thread-safe."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self._lock = threading.Lock()
        self.tree: Tree | None = None
        """What every node has; None before the first call, and where one may lack something."""

    def begin(self) -> None:
        """The nodes are new: they have nothing."""
        self.tree = None

    def close(self) -> None:
        self._project.close()

    def read_ahead(self) -> None:
        """Reads the project while the hosts are being reached."""
        with contextlib.suppress(UsageError):  # raised again by the first call
            for _ in range(2):  # new folders are read, watched, and read again
                self._project.tree()

    def digest(self, nodes: Sequence[Node], replan: Callable[[str], None]) -> str:
        """The project's digest, once every node has its files. `replan` is told of another one than before."""
        tree = self._project.tree()
        if tree is self.tree:
            return tree.digest
        with self._lock:
            tree = self._project.tree()  # read again: another thread may have sent a newer one meanwhile
            behind = [node for node in nodes if node.lost is None and not node.knows(tree)]
            with ThreadPoolExecutor(min(32, max(1, len(behind)))) as pool:
                while not all(list(pool.map(functools.partial(_learns, tree), behind))):
                    tree = self._project.tree(anew=True)  # a file has changed since the tree was read
            self.tree = tree
            replan(tree.digest)
        return tree.digest

    def take_back(self, node: Node, accept: Callable[[], None]) -> None:
        """A node that was lost is there again, and gets what the others have. `accept` lets calls go to it."""
        while True:
            with self._lock:  # no other tree is sent to the others between this look and then
                tree = self.tree
                if tree is None or node.knows(tree):
                    accept()
                    return
            if not node.sync_project(tree):  # a file has changed: the next call looks again
                with self._lock:
                    self.tree = None


def _learns(tree: Tree, node: Node) -> bool:
    """False: a file has changed since the tree was read. A host that is lost meanwhile learns nothing, and need not."""
    try:
        return node.sync_project(tree)
    except HostLost as error:
        node.note_lost(error)
        return True
