"""Recovery: a host that was lost is tried again now and then, and taken back when it answers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Final

from skyfab.errors import HostLost, SkyfabError
from skyfab.pool.node import Node
from skyfab.session.session import Session
from skyfab.ui.events import Events, HostState

PAUSE: Final = 1.0
LONGEST: Final = 15.0
"""Seconds between attempts: the first, and what they grow to."""


OnRecovered = Callable[[Node, Callable[[], None]], None]


class Recovery:
    """Waits for lost hosts while their pool is open."""

    def __init__(self, session_for: Callable[[Node], Session], on_recovered: OnRecovered, events: Events) -> None:
        """`on_recovered` is called with a node that has a new session and knows nothing, and with what accepts it."""
        self._session_for = session_for
        self._on_recovered = on_recovered
        self._events = events
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._sessions: set[Session] = set()
        self._threads: list[threading.Thread] = []
        self._expected: set[int] = set()
        """The nodes that are waited for, each by one thread, until calls may go to them again."""

    def expect(self, node: Node, error: Exception) -> None:
        """The node was lost just now."""
        with self._lock:
            node.lost = error
            if not self._over.is_set() and node.index not in self._expected:
                self._expected.add(node.index)
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                thread = threading.Thread(target=self._wait, args=(node,), name="skyfab-homecoming", daemon=True)
                self._threads.append(thread)
                thread.start()

    def begin(self) -> None:
        self._over.clear()

    def close(self) -> None:
        """Nobody is expected any more."""
        with self._lock:
            self._over.set()
            sessions, threads, self._threads = list(self._sessions), self._threads, []
            self._expected.clear()
        for session in sessions:
            session.close()
        for thread in threads:
            thread.join()

    def _wait(self, node: Node) -> None:
        pause = PAUSE
        while not self._over.wait(pause):
            session = self._session_for(node)
            with self._lock:
                if self._over.is_set():
                    return
                self._sessions.add(session)
            try:
                session.open()
                self._receive(node, session)
                return
            except SkyfabError:
                session.close()
                pause = min(LONGEST, pause * 1.5)
            finally:
                with self._lock:
                    self._sessions.discard(session)

    def _receive(self, node: Node, session: Session) -> None:
        """Takes a node back. Raises HostLost when it is lost again before that is done."""

        def accept() -> None:
            with self._lock:
                if session.has_ended:  # `expect` is about to be called, and this thread goes on waiting
                    raise HostLost("lost again", host=node.name)
                node.lost = None
                self._expected.discard(node.index)

        before = node.session
        node.reset(session)
        self._on_recovered(node, accept)
        self._events.emit(HostState(host=node.name, state="ready", detail="taken back"))
        before.close()
        with contextlib.suppress(SkyfabError):  # it may be gone, and if not it ends by itself after its lease
            before.end_agent(stopped=self._over.is_set)
