"""The reunion of a session with its host: from when it is doubted that they hear each other until they do, or never."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from skyfab.errors import HostLost
from skyfab.inbox import Inbox, Listener
from skyfab.revival import Join, Revival
from skyfab.transport.base import Stream, Transport
from skyfab.wire import Wire

DOUBT: Final = 3.0
"""Seconds without a word after which another connection is tried."""


class Reunion:
    """Finds a session's host again. `fresh` and `verdict` are for whoever reads the session to act on."""

    def __init__(
        self,
        wire: Wire,
        inbox: Inbox,
        lock: threading.Lock,
        listener: Listener,
        *,
        host: str,
        lease: float,
        silence: float,
        over: Callable[[], bool],
        reach: Callable[[], Transport],
        join: Join,
    ) -> None:
        """`over` says that nobody wants them to meet any more. `join` opens another stream to the same agent."""
        self._wire = wire
        self._inbox = inbox
        self._lock = lock
        self._listener = listener
        self._host = host
        self._lease = lease
        self._silence = silence
        self._over = over
        self._reach = reach
        self._join = join
        self.fresh: tuple[Stream, Transport] | None = None
        """A stream that is to take the place of the one before."""
        self.verdict: Exception | None = None
        """There is no more hope."""
        self._revival: Revival | None = None
        self._quiet_since = 0.0
        self._others_since = 0.0
        """Since when other hosts answer while this one does not."""
        self._adopted = 0.0
        self._renewed = False
        """There is another stream than the one that was doubted."""
        self._proof = 0
        """A sign of life that shows that the host hears us too."""
        self._greetings = 0
        """How often the agent had said hello when the stream that is there was taken."""

    @property
    def heard(self) -> float:
        """When the host last said something; it says something every few seconds."""
        return self._inbox.mux.heard if self._revival is None else self._quiet_since

    def doubt(self, reason: str) -> None:
        """Something is wrong with the stream, or there is none. With the lock held."""
        if self._revival is not None or self._over():
            return
        self._quiet_since = self._inbox.mux.heard
        self._proof = self._inbox.mux.ping()
        self._renewed = False
        self._others_since = self._quiet_since
        self._inbox.after.append(lambda: self._listener.apart(reason))
        self._revival = Revival(
            self._reach,
            self._join,
            needless=self._is_needless,
            hopeless=self._hopeless,
            hopeful=self._is_hopeful,
            take=self._offer,
            give_up=self._give_up,
        )

    def adopt(self) -> None:
        """Goes on with the new stream. With the lock held, by whoever reads."""
        assert self.fresh is not None
        fresh, self.fresh = self.fresh, None
        self._wire.take(*fresh)
        self._adopted = time.monotonic()
        self._renewed = True
        self._greetings = self._inbox.greetings

    def close(self) -> None:
        """What nobody has adopted is not wanted any more."""
        fresh, self.fresh = self.fresh, None
        if fresh is not None:
            for part in fresh:
                part.close()

    # ---- what the revival wants to know

    def _is_needless(self) -> bool:
        """The host speaks again; or nobody wants it to."""
        if self._over():
            return True
        with self._lock:
            well = self._wire.stream is not None and self.fresh is None and not self._is_new
            well = well and (self._renewed or self._inbox.mux.echoed >= self._proof)
            if well:
                self._revival = None
        if well:
            self._listener.together(time.monotonic() - self._quiet_since)
        return well

    @property
    def _is_new(self) -> bool:
        """The stream that is there has not brought the agent's hello yet."""
        return self._inbox.greetings == self._greetings

    def _is_hopeful(self) -> bool:
        """A new stream is there, and may have something to say soon."""
        if self.fresh is not None:
            return True
        return self._wire.stream is not None and self._is_new and time.monotonic() - self._adopted < DOUBT

    def _hopeless(self) -> Exception | None:
        now = time.monotonic()
        if now - self._quiet_since > self._lease:
            return HostLost(f"gone for more than its lease of {self._lease:g} s", host=self._host, hint="is it up?")
        if not self._listener.others_answer():  # when they do again, this one gets its time too
            self._others_since = float("inf")
        elif self._others_since > now:
            self._others_since = now
        if now - self._others_since > self._silence:
            return HostLost(f"not a word for {self._silence:g} s, and others answer", host=self._host, hint="is it up?")
        return None

    def _offer(self, stream: Stream, transport: Transport) -> bool:
        with self._lock:
            if self.fresh is not None or self._over():
                return False
            self.fresh = (stream, transport)
        self._wire.poke()
        return True

    def _give_up(self, error: Exception) -> None:
        self.verdict = error
        self._wire.poke()
