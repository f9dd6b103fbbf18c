"""Limits the number of parallel SSH logins, and retries those that a busy server rejected.

An SSH server drops some new connections while ten others have not authenticated yet (MaxStartups 10:30:100). One server
may be on the path to many hosts, as a jump host is. Each login also costs CPU time on this machine.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final, TypeVar

from skyfab.errors import HostLost, Unreachable

T = TypeVar("T")

_PER_SERVER: Final = 8
"""Parallel logins at one server. Other users may log in there too."""
_ALL: Final = max(32, min(256, 16 * (os.cpu_count() or 1)))
"""Parallel logins of this program."""
_PROGRAM: Final = "this program"
"""Counts like a server on the path of every login."""
_PAUSES: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Seconds before each retry, with jitter."""


class ServerBusy(Unreachable):
    """An SSH server closed the connection before authentication."""


class Logins:
    """Starts logins, within the limits of their servers and of this program."""

    def __init__(self, *, most: int = _ALL, per_server: int = _PER_SERVER) -> None:
        self._per_server = per_server
        self._changed = threading.Condition()
        self._at: Counter[str] = Counter()
        self._limits: dict[str, int] = {_PROGRAM: most}
        """Those of servers are here if they differ from `per_server`."""

    def turn(self, servers: Sequence[str], stopped: Callable[[], bool] = lambda: False) -> ExitStack:
        """Waits until the login may begin; `servers` are all those on its path. Without any there is no wait.

        Close what is returned when the login has succeeded or failed, so that the next one may begin; it can be closed
        twice. Raises HostLost if `stopped` becomes true before.
        """
        places = {*servers, _PROGRAM} if servers else set()
        with self._changed:
            while any(self._at[place] >= self._limit(place) for place in places):
                self._changed.wait(0.2)
                if stopped():
                    raise HostLost("the pool was closed")
            self._at.update(places)
        turn = ExitStack()
        turn.callback(self._leave, places)
        return turn

    def turned_away(self, servers: Sequence[str]) -> None:
        """A server rejected a login: reduces the limit of each, since it is not known which one it was."""
        with self._changed:
            for server in servers:
                self._limits[server] = max(1, self._limit(server) - 1)

    def _limit(self, place: str) -> int:
        return self._limits.get(place, self._per_server)

    def _leave(self, places: set[str]) -> None:
        with self._changed:
            self._at.subtract(places)
            self._changed.notify_all()


LOGINS: Final = Logins()
"""The logins of this program."""


def retry(log_in: Callable[[], T], stopped: Callable[[], bool], pauses: Sequence[float] = _PAUSES) -> T:
    """Logs in, with retries while the server is busy. Raises Unreachable if it stays busy."""
    left = iter(pauses)
    while True:
        try:
            return log_in()
        except ServerBusy as error:
            if (pause := next(left, None)) is None:
                message = f"{error.message} (tried {len(pauses) + 1} times)"
                raise Unreachable(message, host=error.host, hint=error.hint) from None
            until = time.monotonic() + pause * random.uniform(0.7, 1.3)
            while time.monotonic() < until and not stopped():
                time.sleep(0.05)
            if stopped():
                raise
