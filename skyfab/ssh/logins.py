"""Limits the number of parallel SSH logins, and retries those that a busy server rejected.

An SSH server drops some new connections while ten others have not authenticated yet (MaxStartups 10:30:100). One server
may be on the path to many hosts, as a jump host is. Each login also costs CPU time on this machine.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from skyfab.errors import HostLost, Unreachable

T = TypeVar("T")

_PER_SERVER: Final = 8
"""Parallel logins at one server. Other users may log in there too."""
_ALL: Final = max(32, min(256, 16 * (os.cpu_count() or 1)))
"""Parallel logins of this program."""
_PAUSES: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Seconds before each retry, with jitter."""


class ServerBusy(Unreachable):
    """An SSH server closed the connection before authentication."""


class Turn:
    """A login's place in the queue, and later among the logins in progress."""

    def __init__(self, queue: Logins, servers: Sequence[str]) -> None:
        self._queue = queue
        self.servers = frozenset(servers)
        self.granted = threading.Event()
        self.ended = False

    def over(self) -> None:
        """The login has succeeded or failed: the next one may begin. May be called twice."""
        if not self.ended:
            self._queue.leave(self)

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, *_: object) -> None:
        self.over()


class Logins:
    """Starts logins in order, as far as their servers' limits allow."""

    def __init__(self, *, most: int = _ALL, per_server: int = _PER_SERVER) -> None:
        self._most = most
        self._per_server = per_server
        self._lock = threading.Lock()
        self._waiting: deque[Turn] = deque()
        self._count = 0
        self._at: Counter[str] = Counter()
        self._less: Counter[str] = Counter()
        """By how many logins a server's limit is reduced."""

    def turn(self, servers: Sequence[str], stopped: Callable[[], bool] = lambda: False) -> Turn:
        """Waits until the login may begin; `servers` are all those on its path. Without any there is no wait.

        Raises HostLost if `stopped` becomes true before.
        """
        turn = Turn(self, servers)
        if not servers:
            turn.ended = True
            return turn
        with self._lock:
            self._waiting.append(turn)
            self._advance()
        try:
            while not turn.granted.wait(0.2):
                if stopped():
                    raise HostLost("the pool was closed")
        except BaseException:
            turn.over()
            raise
        return turn

    def turned_away(self, servers: Sequence[str]) -> None:
        """A server rejected a login: reduces the limit of each, since it is not known which one it was."""
        with self._lock:
            for server in servers:
                self._less[server] = min(self._less[server] + 1, self._per_server - 1)

    def leave(self, turn: Turn) -> None:
        with self._lock:
            if turn.ended:
                return
            turn.ended = True
            if turn.granted.is_set():
                self._count -= 1
                self._at.subtract(turn.servers)
            else:
                self._waiting.remove(turn)
            self._advance()

    def _advance(self) -> None:
        for turn in list(self._waiting):
            if self._count >= self._most:
                return
            if all(self._at[server] < self._per_server - self._less[server] for server in turn.servers):
                self._waiting.remove(turn)
                self._count += 1
                self._at.update(turn.servers)
                turn.granted.set()


LOGINS: Final = Logins()
"""The logins of this program."""


def retry(log_in: Callable[[], T], stopped: Callable[[], bool], pauses: Sequence[float] = _PAUSES) -> T:
    """Logs in, with retries while the server is busy. Raises Unreachable if it stays busy."""
    for pause in pauses:
        try:
            return log_in()
        except ServerBusy:
            until = time.monotonic() + pause * random.uniform(0.7, 1.3)
            while time.monotonic() < until and not stopped():
                time.sleep(0.05)
            if stopped():
                raise
    try:
        return log_in()
    except ServerBusy as error:
        message = f"{error.message} (tried {len(pauses) + 1} times)"
        raise Unreachable(message, host=error.host, hint=error.hint) from None
