"""`Asker`: asks hosts questions, which they answer in Python without an agent (skyfab.host.ask).

One login for each host, on first use; it is kept for further questions, and renewed after a failure.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from skyfab.errors import HostLost, SkyfabError, Unreachable
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.inventory.ssh_config import known_settings
from skyfab.session.bootstrap import Bootstrap, log_in
from skyfab.session.bundle import bundle
from skyfab.session.fanout import PATIENCE, Raised, for_each_host
from skyfab.session.question import Question, QuestionStream
from skyfab.session.shell import Shell
from skyfab.session.timing import Backoff
from skyfab.ssh import CONNECT_TIMEOUT, transport_for
from skyfab.ssh.base import Stream, Transport
from skyfab.ssh.logins import retry
from skyfab.ssh.tunnel import Tunnel
from skyfab.ui.events import Events, HostState
from skyfab.ui.prompt import TERMINAL

T = TypeVar("T")
Prepare = Callable[[Host, str], Callable[[Shell], "str | None"]]
"""For a host without Python and the name of a session: what installs an interpreter (see `Bootstrap.prepare`)."""

PASSING: Final = (HostLost, Unreachable)
"""Errors that a retry may resolve."""
_LOG: Final = logging.getLogger("skyfab")
_PAUSE: Final = 0.5
"""Seconds before a host is retried after its first failure."""
_LONGEST: Final = 15.0
"""The maximum that these seconds grow to."""
_CLOSE: Final = 3.0
"""Seconds that a thread has to stop, as while it asks the user for a password."""
_HEARTBEAT: Final = 1.0
"""Seconds between two heartbeats: a host takes a client that sends none for a minute for gone."""
_SOON: Final = 2
"""Seconds in which a host must accept a connection: others have answered, and the user waits."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """The answer of one host, or why there is none."""

    host: Host
    answer: T | None = None
    error: SkyfabError | None = None

    def get(self) -> T:
        """Returns the answer. Raises the error."""
        if self.error is not None:
            raise self.error
        return self.answer  # type: ignore[return-value]  # None only where T allows it


class Asker:
    """Asks hosts, all at once. A context manager: at its end the connections are closed, and with them what runs."""

    def __init__(
        self,
        hosts: Sequence[Host],
        inventory: Inventory,
        *,
        events: Events | None = None,
        prepare: Prepare | None = None,
        until: float = float("inf"),
        trouble: Callable[[SkyfabError], None] | None = None,
    ) -> None:
        """`prepare` installs Python on a host that has none; with it, an interpreter that the inventory names must be
        there. Waits end at `until`. `trouble` is called once whenever a host stops answering.
        """
        self.hosts = hosts
        self.inventory = inventory
        self.events = events or Events()
        self.prepare = prepare
        self.trouble = trouble
        self.soon = False
        """Whether to wait only for hosts from which something arrives. The others continue to be asked meanwhile."""
        self._until = until
        self._closed = threading.Event()
        self._starting = threading.Lock()
        self._beating: threading.Thread | None = None
        self.lines = {host.name: _Line(host, self) for host in hosts}
        self._shared: Mapping[str, _Line] = {}

    def __enter__(self) -> Asker:
        return self

    def stop(self) -> None:
        """Withdraws all questions: the threads that wait for a host stop soon. Thread-safe."""
        self._closed.set()

    def __exit__(self, *_: object) -> None:
        self.stop()
        for_each_host(_Line.end, [line for name, line in self.lines.items() if name not in self._shared])

    def sharing(self, other: Asker | None) -> Asker:
        """Uses the connections that another asker has, if there is one, and leaves them open. Returns this one."""
        if other is not None:
            self._shared = other.lines
            self.lines.update(other.lines)
        return self

    def is_over(self) -> bool:
        return self._closed.is_set() or time.monotonic() > self._until

    def keep_alive(self) -> None:
        """Sends heartbeats to all hosts from now on, from a thread: whoever reads an answer may take long."""
        with self._starting:
            if self._beating is None:
                self._beating = threading.Thread(target=self._beat, name="skyfab-ask", daemon=True)
                self._beating.start()

    def _beat(self) -> None:
        while not self._closed.wait(_HEARTBEAT):
            for line in self.lines.values():
                line.beat()

    def ask(self, question: Question[T], hosts: Sequence[Host] | None = None) -> list[Outcome[T]]:
        """Asks all hosts, or these, in parallel. Returns an outcome for each, in order."""
        return self.each(lambda host: self.ask_one(question, host), hosts)

    def each(self, work: Callable[[Host], T], hosts: Sequence[Host] | None = None) -> list[Outcome[T]]:
        """Does `work`, which asks one host, for all hosts, or these, in parallel. Returns an outcome for each.

        Raises an error that is not a SkyfabError: a bug.
        """
        chosen = self.hosts if hosts is None else hosts
        lines = [self.lines[host.name] for host in chosen]
        found = for_each_host(work, chosen, lambda: self.soon and not any(line.is_awaited for line in lines))
        return [_outcome(host, one) for host, one in zip(chosen, found, strict=True)]

    def ask_one(self, question: Question[T], host: Host) -> T:
        """Asks one host. Raises a HostError; after a failure the same one for a while, without asking again."""
        return self.lines[host.name].ask(question, self)

    def take(self, host: Host) -> Transport | None:
        """The connection to a host, if there is one: a transport whose `open` runs a command without another login."""
        return self.lines[host.name].take()


def _outcome(host: Host, found: T | Raised) -> Outcome[T]:
    if not isinstance(found, Raised):
        return Outcome(host, found)
    if not isinstance(found.error, SkyfabError):
        raise found.error
    return Outcome(host, error=found.error)


class _Line:
    """The connection to one host. For one thread at a time."""

    def __init__(self, host: Host, asker: Asker) -> None:
        self._host = host
        self._asker = asker
        """The one whose question is answered now, or was last."""
        self._told: Asker | None = None
        """The one that knows that the host does not answer."""
        self._lock = threading.Lock()
        self._frames: QuestionStream | None = None
        self._transport: Transport | None = None
        self._error: SkyfabError | None = None
        self._retry_at = 0.0
        self._waits = Backoff(_PAUSE, _LONGEST, jitter=0.3)

    @property
    def is_awaited(self) -> bool:
        """Whether something arrives of the answer, or the user is asked for a password."""
        return TERMINAL.is_busy or (self._frames is not None and time.monotonic() - self._frames.answered < PATIENCE)

    def ask(self, question: Question[T], asker: Asker) -> T:
        if asker.soon and self._lock.locked():
            raise Unreachable("no response yet", host=self._host.name)
        with self._lock:
            self._asker = asker
            if self._error is not None and time.monotonic() < self._retry_at:
                raise self._error.with_traceback(None)
            try:
                answer = self._ask(question)
            except PASSING as error:
                self._failed(error)
                raise
            except BaseException as error:
                if self._frames is None and isinstance(error, SkyfabError):  # the connection could not be opened
                    self._failed(error)
                self._close()  # it is unknown how much of the answer was read
                raise
            self._error = self._told = None
            return answer

    def _ask(self, question: Question[T]) -> T:
        if self._frames is not None:
            try:
                return self._frames.ask(question)
            except PASSING:
                if self._frames.has_replied:
                    raise
                self._close()  # it ended while nothing was asked
        return self._open().ask(question)

    def _open(self) -> QuestionStream:
        self._asker.events.emit(HostState(host=self._host.name, state="connecting"))
        try:
            stream = retry(self._log_in, self._asker.is_over)
        except SkyfabError as error:
            if not self._asker.is_over():
                detail = error.message.partition("\n")[0]
                self._asker.events.emit(HostState(host=self._host.name, state="failed", detail=detail))
            raise
        self._frames = QuestionStream(self._host, stream, lambda: self._asker.is_over())  # noqa: PLW0108  # there will be others
        if self._asker.is_over():
            raise HostLost("the question was cancelled", host=self._host.name)
        self._asker.keep_alive()
        self._asker.events.emit(HostState(host=self._host.name, state="ready"))
        return self._frames

    def _log_in(self) -> Stream:
        host, asker = self._host, self._asker
        _LOG.debug("%s: connecting", host.name)
        session = os.urandom(8).hex()
        named = "auto" if asker.prepare is None else host.python  # what is kept on a host, any Python can read
        prepare = asker.prepare(host, session) if asker.prepare is not None and named == "auto" else None
        default = sys.executable if host.is_here else "any"
        launch = Bootstrap(
            host=host,
            session=session,
            bundle=bundle(),
            python=default if named == "auto" else named,
            prepare=prepare,
            setup=host.setup,
        )
        is_soon = asker.prepare is None and _is_direct(host, asker.inventory)
        connect_timeout = _SOON if is_soon else CONNECT_TIMEOUT
        transport = transport_for(host, asker.inventory, connect_timeout=connect_timeout)
        stream, _ = log_in(launch, transport, "ask", asker.is_over)
        self._transport = transport
        return stream

    def _failed(self, error: SkyfabError) -> None:
        if self._error is None:
            self._waits = Backoff(_PAUSE, _LONGEST, jitter=0.3)
        if self._asker.trouble is not None and self._told is not self._asker and not self._asker.is_over():
            self._told = self._asker
            self._asker.trouble(error)
        self._error, self._retry_at = error, time.monotonic() + self._waits.next()
        self._close()

    def _close(self) -> None:
        frames, transport, self._frames, self._transport = self._frames, self._transport, None, None
        if frames is not None:
            frames.close()
        if transport is not None:
            transport.close()

    def beat(self) -> None:
        if (frames := self._frames) is not None:
            frames.beat()

    def end(self) -> None:
        """Closes the connection. A thread that uses it stops soon; if it does not, it is left to that thread."""
        if self._lock.acquire(timeout=_CLOSE):
            try:
                self._close()
            finally:
                self._lock.release()

    def take(self) -> Transport | None:
        with self._lock:
            frames, transport = self._frames, self._transport
            if frames is None or transport is None:
                return None
            self._frames = self._transport = None
            frames.stop_beating()
            return _Taken(frames, transport)


def _is_direct(host: Host, inventory: Inventory) -> bool:
    """Whether ssh connects to the host itself. Else the time includes logins elsewhere, which may ask for passwords."""
    if host.transport == "local" or inventory.jump_chain(host):
        return False
    return host.jump == "none" or known_settings(host).keys().isdisjoint(("proxyjump", "proxycommand"))


class _Taken:
    """A connection on which questions were answered, as a transport whose first command needs no login."""

    def __init__(self, frames: QuestionStream, transport: Transport) -> None:
        self._frames: QuestionStream | None = frames
        self._transport = transport
        self.servers: Sequence[str] = ()

    def open(self, command: str, stopped: Callable[[], bool] = lambda: False) -> Stream:
        """Has the process that answered become the command."""
        frames, self._frames = self._frames, None
        assert frames is not None
        frames.send("become", {"command": command})
        return frames.stream

    def forward(self, port: int, to: tuple[str, int], stopped: Callable[[], bool] = lambda: False) -> Tunnel:
        return self._transport.forward(port, to, stopped)

    def joined(self) -> None:
        self._transport.joined()

    def close(self) -> None:
        if self._frames is not None:
            self._frames.close()
        self._transport.close()
