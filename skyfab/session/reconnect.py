"""Failure detection and reconnect: from the first missed heartbeat until the session resumes or the host is lost.

Several attempts run in parallel: a packet that was lost on a dead link is retransmitted only after seconds, so that an
attempt from before the link's recovery may complete later than a new one. The first that succeeds is used.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from skyfab.errors import HostLost, HostUnfit, SkyfabError
from skyfab.session.timing import Backoff, Timing
from skyfab.ssh.base import AgentGone, Stream, Transport
from skyfab.ui.prompt import TERMINAL

ATTEMPT: Final = 10.0
"""Seconds that an attempt may take."""
MOST_ATTEMPTS: Final = 6
"""In parallel; the oldest is abandoned for a new one."""

Link = tuple[Stream, Transport]
"""A stream to the agent, and the transport that opened it."""


def backoff() -> Backoff:
    """The waits between attempts."""
    return Backoff(0.1, 0.7, jitter=0.3)


class Reconnector:
    """Serves one connection from when it becomes suspect until it is open, lost or closed."""

    def __init__(self, connection: Any, reason: str, since: float) -> None:
        """Called with the lock of the `Connection` held. With an empty `reason`, the broken stream gives the reason."""
        self._connection = connection
        self._timing: Timing = connection.timing
        self._reason = reason
        self.candidate: Link | None = None
        """A stream that the connection should switch to."""
        self.lost_error: Exception | None = None
        """Why the host is lost."""
        self.since = since
        self.received = connection.replies.mux.received
        self._others_since = self.since
        """Since when other hosts have responded while this one has not."""
        self._ping_seq = connection.replies.mux.ping()
        """The reply to this ping shows that the host receives what is sent."""
        self._announced = False
        self._waits = backoff()
        self._attempt_at = 0.0
        self._switched_at = 0.0
        self._hellos: int | None = None
        """The number of hellos received when the connection switched streams; None: it has not switched."""
        self._broken: deque[Link] = deque()
        self._attempts: list[_Attempt] = []
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._run, name="skyfab-reconnect", daemon=True)

    def start(self) -> None:
        """Starts its thread. Called again every second: until then, this machine may lack threads."""
        with suppress(RuntimeError):  # it lacks them, or the thread was started before
            self._thread.start()

    # ---- called by the connection, with its lock held

    def broke(self, link: Link) -> None:
        """Takes a stream that has ended, to find out why and to close it."""
        self._broken.append(link)
        self._news.set()

    def take_candidate(self) -> Link | None:
        """Returns the candidate, to which the connection switches now."""
        candidate, self.candidate = self.candidate, None
        if candidate is not None:
            self._switched_at = self._timing.clock()
            self._hellos = self._connection.replies.hellos
        return candidate

    # ---- the reconnector's thread

    def _run(self) -> None:
        try:
            while self.step(self._timing.clock()):
                self._news.wait(0.05)
                self._news.clear()
        finally:
            self._drop()

    def step(self, now: float) -> bool:
        """Checks the progress, and starts an attempt when one is due. False: finished."""
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
        if now >= self._attempt_at and not self._is_hopeful(now) and not (self._attempts and TERMINAL.is_busy):
            self._attempt()
            self._attempt_at = now + self._waits.next()
        return True

    def _drop(self) -> None:
        """Closes attempts and the candidate, which are no longer needed."""
        for attempt in self._attempts:
            attempt.abandon()
        with self._connection.lock:
            candidate, self.candidate = self.candidate, None
        if candidate is not None:
            close(candidate)

    def _explain(self) -> Exception | None:
        """Finds out why streams have ended; returns an error that no new stream can resolve."""
        fatal = None
        while self._broken:
            link = self._broken.popleft()
            error = link[0].explain()
            self._reason = self._reason or (error.message if isinstance(error, SkyfabError) else str(error))
            if isinstance(error, AgentGone) or self._connection.timing.lease <= 0:
                fatal = error
            close_later(link)
        return fatal

    def _is_over(self) -> bool:
        """Whether the agent responds again, or the connection is being closed."""
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
        """Whether the agent's hello has not been received yet on the current stream."""
        return bool(self._connection.replies.hellos == self._hellos)

    def _is_hopeful(self, now: float) -> bool:
        """Whether a new stream exists whose hello may arrive soon."""
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
            text = f"not reachable for more than its lease of {connection.timing.lease:g} s"
            return HostLost(text, host=connection.host, hint=f"skyfab doctor --hosts={connection.host}")
        if not connection.listener.others_respond():  # when they respond again, this host gets the full timeout
            self._others_since = float("inf")
        elif self._others_since > now:
            self._others_since = now
        if now - self._others_since > connection.timing.heartbeat_timeout:
            text = f"no heartbeat for {connection.timing.heartbeat_timeout:g} s while other hosts respond"
            return HostLost(text, host=connection.host, hint=f"skyfab doctor --hosts={connection.host}")
        return None

    def _attempt(self) -> None:
        if len(self._attempts) >= MOST_ATTEMPTS:
            self._attempts.pop(0).abandon()
        self._attempts.append(_Attempt(self._connection.joiner, self._news))

    def _collect(self) -> Exception | None:
        """Collects finished attempts. Returns an error after which further attempts are useless."""
        for attempt in [attempt for attempt in self._attempts if attempt.is_over]:
            self._attempts.remove(attempt)
            if attempt.link is not None:
                if not self._offer(attempt.link):
                    attempt.abandon()
            elif isinstance(attempt.error, HostUnfit):
                return HostLost("it was restarted, or its agent was killed", host=attempt.error.host)
            elif not isinstance(attempt.error, (SkyfabError, OSError, RuntimeError)):  # lack of processes, threads
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
    """One attempt, on its own thread."""

    def __init__(self, joiner: Any, news: threading.Event) -> None:
        self.link: Link | None = None
        self.error: Exception | None = None
        self._joiner = joiner
        self._news = news
        self._abandoned = False
        self._lock = threading.Lock()
        try:
            spawn(self._run, "skyfab-attempt")
        except RuntimeError as error:
            self.error = error

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
        """Cancels the attempt, and closes its stream."""
        with self._lock:
            self._abandoned = True
            link, self.link = self.link, None
        if link is not None:
            close(link)


def as_lost(error: Exception | None, host: str) -> HostLost:
    """Converts the error of a connection that was open: the host is lost, whatever the error says."""
    if isinstance(error, HostLost):
        return error
    lost = HostLost(str(error), host=host)
    if isinstance(error, SkyfabError):
        lost = HostLost(error.message, host=host, hint=error.hint)
    lost.__cause__ = error
    return lost


def close(link: Link) -> None:
    """Closes both, and waits for their processes and threads on this machine."""
    stream, transport = link
    stream.close()
    transport.close()


def close_later(link: Link) -> None:
    """Closes both on another thread, since it may block. If this machine lacks threads, it does block."""
    try:
        spawn(lambda: close(link), "skyfab-close")
    except RuntimeError:
        close(link)


def spawn(work: Callable[[], None], name: str) -> None:
    """Runs `work` on a daemon thread. Raises RuntimeError if this machine lacks threads."""
    threading.Thread(target=work, name=name, daemon=True).start()
