"""Failure detection and reconnect: from the first missed heartbeat until the session resumes or the host is lost.

Several attempts run at a time: a packet that is lost on a dead link is sent again only after seconds, so that an
attempt from before the link's return may arrive later than a new one. The first that succeeds is taken.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from skyfab.errors import HostLost, HostUnfit, SkyfabError
from skyfab.session.backoff import Backoff
from skyfab.session.replies import Listener, Replies
from skyfab.session.timing import Timing
from skyfab.session.transport.base import Stream, Transport

ATTEMPT: Final = 10.0
"""Seconds that an attempt may take."""
MOST_ATTEMPTS: Final = 6
"""At a time; the oldest one is given up for a new one."""
GONE: Final = "agent is gone"
"""What the link says of an agent that it does not find."""

Link = tuple[Stream, Transport]
"""A stream to the agent, and the transport that it came from."""


def backoff() -> Backoff:
    """The waits between attempts."""
    return Backoff(0.1, 0.7, jitter=0.3)


class Joiner(Protocol):
    """Opens streams to one agent."""

    def transport(self) -> Transport:
        """A way to its host."""

    def rejoin(self, transport: Transport, deadline: float, stopped: Callable[[], bool]) -> Stream:
        """Another stream to the same agent, unless that is `stopped`. Raises a HostError."""


class Suspect(Protocol):
    """A connection whose agent may be gone."""

    lock: threading.Lock
    replies: Replies
    listener: Listener
    joiner: Joiner
    host: str
    timing: Timing
    stream: Stream | None

    @property
    def is_suspect(self) -> bool: ...

    def resume(self) -> None:
        """It is open again. With the lock held."""

    def wake(self) -> None:
        """Look at `candidate` and `lost_error`."""


class Reconnector:
    """Works for one connection from when it becomes suspect until it is open, lost, or not wanted any more."""

    def __init__(self, connection: Suspect, reason: str) -> None:
        """With the connection's lock held. An empty `reason` is one that a broken stream explains."""
        self._connection = connection
        self._timing = connection.timing
        self._reason = reason
        self.candidate: Link | None = None
        """A stream that the connection is to switch to."""
        self.lost_error: Exception | None = None
        """Why the host is lost."""
        self.since = connection.replies.mux.heard
        self._others_since = self.since
        """Since when other hosts respond while this one does not."""
        self._ping_seq = connection.replies.mux.ping()
        """Its reply shows that the host receives what is sent."""
        self._announced = False
        self._waits = backoff()
        self._attempt_at = 0.0
        self._switched_at = 0.0
        self._hellos: int | None = None
        """How often the agent had said hello when the connection switched; None: it did not."""
        self._broken: deque[Link] = deque()
        self._attempts: list[_Attempt] = []
        self._news = threading.Event()

    def start(self) -> None:
        spawn(self._run, "skyfab-reconnect")

    # ---- what the connection tells, with its lock held

    def broke(self, link: Link) -> None:
        """This stream has ended, and is the reconnector's to explain and to close."""
        self._broken.append(link)
        self._news.set()

    def take_candidate(self) -> Link | None:
        """The connection switches to it."""
        candidate, self.candidate = self.candidate, None
        if candidate is not None:
            self._switched_at = self._timing.clock()
            self._hellos = self._connection.replies.hellos
        return candidate

    # ---- the thread

    def _run(self) -> None:
        try:
            while self.step(self._timing.clock()):
                self._news.wait(0.05)
                self._news.clear()
        finally:
            self._drop()

    def step(self, now: float) -> bool:
        """Looks at what has come, and attempts again where it is time to. False: it is over."""
        error = self._explain()
        if error is None and not self._announced:
            self._announced = True
            self._connection.listener.on_disconnect(self._reason)
        if error is None and self._is_over():
            return False
        error = error or self._hopeless(now) or self._collect()
        if error is not None:
            self.lost_error = error
            self._connection.wake()
            return False
        if now >= self._attempt_at and not self._is_hopeful(now):
            self._attempt()
            self._attempt_at = now + self._waits.next()
        return True

    def _drop(self) -> None:
        """What nobody has switched to is not wanted any more."""
        for attempt in self._attempts:
            attempt.abandon()
        with self._connection.lock:
            candidate, self.candidate = self.candidate, None
        if candidate is not None:
            close(candidate)

    def _explain(self) -> Exception | None:
        """Why streams have ended; returns an error that no other stream will cure."""
        fatal = None
        while self._broken:
            link = self._broken.popleft()
            error = link[0].explain()
            self._reason = self._reason or (error.message if isinstance(error, SkyfabError) else str(error))
            if GONE in str(error) or self._connection.timing.lease <= 0:
                fatal = error
            close_later(link)
        return fatal

    def _is_over(self) -> bool:
        """The agent responds again; or nobody wants it to."""
        connection = self._connection
        with connection.lock:
            if not connection.is_suspect:
                return True
            well = connection.stream is not None and self.candidate is None and not self._is_new
            if not well or (self._hellos is None and connection.replies.mux.echoed < self._ping_seq):
                return False
            connection.resume()
        connection.listener.on_reconnect(self._timing.clock() - self.since)
        return True

    @property
    def _is_new(self) -> bool:
        """The stream that is there has not brought the agent's hello yet."""
        return self._connection.replies.hellos == self._hellos

    def _is_hopeful(self, now: float) -> bool:
        """A new stream is there, and may bring the agent's hello soon."""
        if self.candidate is not None:
            return True
        return (
            self._connection.stream is not None
            and self._is_new
            and now - self._switched_at < self._timing.suspect_after
        )

    def _hopeless(self, now: float) -> Exception | None:
        connection = self._connection
        if now - self.since > connection.timing.lease:
            text = f"gone for more than its lease of {connection.timing.lease:g} s"
            return HostLost(text, host=connection.host, hint="is it up?")
        if not connection.listener.others_respond():  # when they do again, this one gets its time too
            self._others_since = float("inf")
        elif self._others_since > now:
            self._others_since = now
        if now - self._others_since > connection.timing.heartbeat_timeout:
            text = f"no heartbeat for {connection.timing.heartbeat_timeout:g} s while other hosts respond"
            return HostLost(text, host=connection.host, hint="is it up?")
        return None

    def _attempt(self) -> None:
        if len(self._attempts) >= MOST_ATTEMPTS:
            self._attempts.pop(0).abandon()
        self._attempts.append(_Attempt(self._connection.joiner, self._news))

    def _collect(self) -> Exception | None:
        """Takes what has come of the attempts. Returns an error after which no other will do better."""
        for attempt in [attempt for attempt in self._attempts if attempt.is_over]:
            self._attempts.remove(attempt)
            if attempt.link is not None:
                if not self._offer(attempt.link):
                    attempt.abandon()
            elif isinstance(attempt.error, HostUnfit):
                return HostLost("it was started again, or its agent was ended", host=attempt.error.host)
            elif not isinstance(attempt.error, SkyfabError):
                return attempt.error
        return None

    def _offer(self, link: Link) -> bool:
        with self._connection.lock:
            if self.candidate is not None or not self._connection.is_suspect:
                return False
            self.candidate = link
        self._connection.wake()
        return True


class _Attempt:
    """One attempt, on a thread of its own."""

    def __init__(self, joiner: Joiner, news: threading.Event) -> None:
        self.link: Link | None = None
        self.error: Exception | None = None
        self._joiner = joiner
        self._news = news
        self._abandoned = False
        self._lock = threading.Lock()
        spawn(self._run, "skyfab-attempt")

    @property
    def is_over(self) -> bool:
        return self.link is not None or self.error is not None

    def _run(self) -> None:
        transport = self._joiner.transport()
        try:
            stream = self._joiner.rejoin(transport, time.monotonic() + ATTEMPT, lambda: self._abandoned)
        except Exception as error:
            transport.close()
            self.error = error
        else:
            with self._lock:
                wanted = not self._abandoned
                if wanted:
                    self.link = (stream, transport)
            if not wanted:
                close((stream, transport))
        self._news.set()

    def abandon(self) -> None:
        """Nobody wants it any more."""
        with self._lock:
            self._abandoned = True
            link, self.link = self.link, None
        if link is not None:
            close(link)


def as_lost(error: Exception | None, host: str) -> HostLost:
    """It was there: whatever its connection says of its end, that is over."""
    if isinstance(error, HostLost):
        return error
    lost = HostLost(str(error), host=host)
    if isinstance(error, SkyfabError):
        lost = HostLost(error.message, host=host, hint=error.hint)
    lost.__cause__ = error
    return lost


def close(link: Link) -> None:
    """Ends both, and waits for what belongs to them on this machine."""
    stream, transport = link
    stream.close()
    transport.close()


def close_later(link: Link) -> None:
    """The same on a thread of its own: it may take a while."""
    spawn(lambda: close(link), "skyfab-close")


def spawn(work: Callable[[], None], name: str) -> None:
    """Does it on a thread of its own, which ends with the program."""
    threading.Thread(target=work, name=name, daemon=True).start()
