"""Revival: a connection that broke, or fell silent, is made anew while there is hope.

One attempt after another, and not one at a time: a packet that is lost on a dead link is sent again only after
seconds, so that an attempt from before the link's return may come later than a new one. The first that gets through is
taken.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Final

from skyfab.errors import HostLost, HostUnfit, SkyfabError
from skyfab.transport.base import Stream, Transport
from skyfab.wire import close

PAUSE: Final = 0.1
LONGEST: Final = 0.7
"""Seconds between attempts: the first, and what they grow to."""
ATTEMPT: Final = 10.0
"""Seconds that an attempt may take."""
_MOST: Final = 6
"""Attempts at a time; the oldest one is given up for a new one."""

Join = Callable[[Transport, float, Callable[[], bool]], Stream]
"""Opens a stream to the agent that is there; until a time, unless it is stopped."""


class Attempt:
    """One attempt, on a thread of its own."""

    def __init__(self, reach: Callable[[], Transport], join: Join, done: threading.Event) -> None:
        self.stream: Stream | None = None
        self.error: Exception | None = None
        self.transport: Transport | None = None
        self._reach = reach
        self._join = join
        self._done = done
        self._abandoned = False
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="skyfab-attempt", daemon=True).start()

    @property
    def over(self) -> bool:
        return self.stream is not None or self.error is not None

    def _run(self) -> None:
        transport = self._reach()
        try:
            stream = self._join(transport, time.monotonic() + ATTEMPT, lambda: self._abandoned)
        except Exception as error:
            transport.close()
            self.error = error
        else:
            with self._lock:
                if not self._abandoned:
                    self.transport, self.stream = transport, stream
            if self.stream is None:
                close(stream, transport)
        self._done.set()

    def abandon(self) -> None:
        """Nobody wants it any more."""
        with self._lock:
            self._abandoned = True
            stream, transport = self.stream, self.transport
            self.stream = self.transport = None
        if stream is not None and transport is not None:
            close(stream, transport)


class Revival:
    """Tries until a stream is taken, the old one speaks again, or there is no more hope."""

    def __init__(
        self,
        reach: Callable[[], Transport],
        join: Join,
        *,
        needless: Callable[[], bool],
        hopeless: Callable[[], Exception | None],
        hopeful: Callable[[], bool],
        take: Callable[[Stream, Transport], bool],
        give_up: Callable[[Exception], None],
    ) -> None:
        """`take` is given a stream, and says whether it wants it; `hopeful` whether one that it took may do.

        `needless` says that all is well again.
        """
        self._reach = reach
        self._join = join
        self._needless = needless
        self._hopeless = hopeless
        self._hopeful = hopeful
        self._take = take
        self._give_up = give_up
        self._attempts: list[Attempt] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="skyfab-revival", daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def _run(self) -> None:
        pause, due = PAUSE, 0.0
        try:
            while not self._needless():
                error = self._hopeless() or self._harvest()
                if error is not None:
                    self._give_up(error)
                    return
                if time.monotonic() >= due and not self._hopeful():
                    self._try()
                    due = time.monotonic() + pause * random.uniform(0.7, 1.3)
                    pause = min(LONGEST, pause * 1.5)
                self._done.wait(0.05)
                self._done.clear()
        finally:
            for attempt in self._attempts:
                attempt.abandon()

    def _try(self) -> None:
        if len(self._attempts) >= _MOST:
            self._attempts.pop(0).abandon()
        self._attempts.append(Attempt(self._reach, self._join, self._done))

    def _harvest(self) -> Exception | None:
        """Takes what has come of the attempts. Returns an error after which no other will do better."""
        for attempt in [attempt for attempt in self._attempts if attempt.over]:
            self._attempts.remove(attempt)
            if attempt.stream is not None and attempt.transport is not None:
                if not self._take(attempt.stream, attempt.transport):
                    attempt.abandon()
            elif isinstance(attempt.error, HostUnfit):
                return HostLost("it was started again, or its agent was ended", host=attempt.error.host)
            elif not isinstance(attempt.error, SkyfabError):
                return attempt.error
        return None
