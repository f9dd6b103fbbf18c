"""Recovery of lost hosts: tries to connect again at intervals, and returns the host to the pool with a new agent."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from skyfab.errors import HostLost, SkyfabError
from skyfab.pool.node import Node
from skyfab.session.session import Session
from skyfab.session.timing import Backoff
from skyfab.ui.events import Events, HostState, Notice

PAUSE: Final = 1.0
LONGEST: Final = 15.0
"""Seconds between attempts: the first pause, and the maximum that it grows to."""
_LOOK: Final = 0.1
"""Seconds between checks whether lost hosts have returned."""


OnRecovered = Callable[[Node, Callable[[], None]], None]


class Recovery:
    """Tries to reconnect to lost hosts while their pool is open."""

    def __init__(self, session_for: Callable[[Node], Session], on_recovered: OnRecovered, events: Events) -> None:
        """`on_recovered` is called with a node whose new agent has nothing yet, and a function that accepts it."""
        self._session_for = session_for
        self._on_recovered = on_recovered
        self._events = events
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._sessions: set[Session] = set()
        self._threads: list[threading.Thread] = []
        self._expected: set[int] = set()
        """The lost nodes, each with one thread that tries to reconnect, until they are accepted for calls again."""

    def expect(self, node: Node, error: Exception) -> None:
        """Marks a node as lost, and starts trying to reconnect."""
        with self._lock:
            node.lost = error
            if not self._over.is_set() and node.index not in self._expected:
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                thread = threading.Thread(target=self._wait, args=(node,), name="skyfab-recovery", daemon=True)
                with contextlib.suppress(RuntimeError):  # this machine lacks threads: the node stays lost
                    thread.start()
                    self._threads.append(thread)
                    self._expected.add(node.index)

    def begin(self) -> None:
        self._over.clear()

    def close(self) -> None:
        """Stops trying."""
        with self._lock:
            self._over.set()
            sessions, threads, self._threads = list(self._sessions), self._threads, []
            self._expected.clear()
        for session in sessions:
            session.close()
        for thread in threads:
            thread.join()

    def _wait(self, node: Node) -> None:
        waits, before = Backoff(PAUSE, LONGEST), node.session
        while not self._over.wait(waits.next()):
            session = self._session_for(node)
            with self._lock:
                if self._over.is_set():
                    return
                self._sessions.add(session)
            try:
                session.open()
                self._receive(node, session, before)
                return
            except (SkyfabError, OSError, RuntimeError):  # this machine lacks processes, threads, descriptors or space
                session.close()
            finally:
                with self._lock:
                    self._sessions.discard(session)

    def _receive(self, node: Node, session: Session, before: Session) -> None:
        """Returns a node to the pool, and ends its agent of `before`. Raises HostLost if it is lost again meanwhile."""

        def accept() -> None:
            with self._lock:
                if session.has_ended:  # `expect` is about to be called, and this thread keeps trying
                    raise HostLost("lost again", host=node.name)
                node.lost = None
                self._expected.discard(node.index)

        node.reset(session)
        self._on_recovered(node, accept)
        self._events.emit(HostState(host=node.name, state="ready", detail="rejoined the pool"))
        before.close()
        with contextlib.suppress(SkyfabError, OSError):  # the old agent may be unreachable; it exits after its lease
            before.end_agent(stopped=self._over.is_set)


def wait_for_lost(nodes: Sequence[Node], seconds: float, events: Events, stopped: Callable[[], bool]) -> None:
    """Waits up to `seconds` until the lost ones of these nodes have returned to their pool."""
    deadline = time.monotonic() + seconds
    lost = [node for node in nodes if node.lost is not None]
    for node in lost:
        events.emit(Notice(host=node.name, text=f"lost; waiting up to {seconds:g} s for it to come back"))
    while any(node.lost is not None for node in lost) and time.monotonic() < deadline and not stopped():
        time.sleep(_LOOK)
