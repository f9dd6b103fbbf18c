"""Homecoming: a host that was lost is tried again now and then, and taken back when it answers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Final

from skyfab.errors import SkyfabError
from skyfab.node import Node
from skyfab.session import Session

PAUSE: Final = 1.0
LONGEST: Final = 15.0
"""Seconds between attempts: the first, and what they grow to."""


class Homecoming:
    """Waits for lost hosts while their pool is open."""

    def __init__(self, session_for: Callable[[Node], Session], welcome: Callable[[Node], None]) -> None:
        """`welcome` is called with a node that has a new session and knows nothing, before calls may go to it."""
        self._session_for = session_for
        self._welcome = welcome
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._sessions: set[Session] = set()
        self._threads: list[threading.Thread] = []

    def expect(self, node: Node) -> None:
        """The node was lost just now."""
        with self._lock:
            if not self._over.is_set():
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
        before = node.session
        node.begin_anew(session)
        self._welcome(node)
        node.lost = None
        before.close()
        with contextlib.suppress(SkyfabError):  # it may be gone, and if not it ends by itself after its lease
            before.end_agent()
