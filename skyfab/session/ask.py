"""`Asker`: asks hosts questions, which they answer in Python without an agent (skyfab.host.ask).

One login for each host, on first use; it is kept for further questions, and renewed after a failure.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, TypeVar

from skyfab.errors import HostLost, HostUnfit, ProtocolError, SkyfabError, Unreachable
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.inventory.ssh_config import known_settings
from skyfab.protocol.frames import HEAD, PING, Reader, frame
from skyfab.session.backoff import Backoff
from skyfab.session.bootstrap import CACHE_HINT, Bootstrap, cannot_run, log_in
from skyfab.session.bundle import bundle
from skyfab.session.fanout import PATIENCE, Raised, for_each_host
from skyfab.session.shell import Deadline, Shell
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
_STORAGE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
"""Errors of the cache folder."""
_INVALID: Final = (ValueError, KeyError, TypeError, AttributeError, RecursionError, StopIteration, OverflowError)
"""What reading an invalid answer raises."""
_HEARTBEAT: Final = 1.0
_SILENCE: Final = 60.0
"""Seconds without a frame of the host after which it is lost: it answers each heartbeat."""
_IDLE: Final = 30.0
"""Seconds without a question after which a connection is not handed on: the host ends it after 60 s."""
_SOON: Final = 2
"""Seconds in which a host must accept a connection: others have answered, and the user waits."""


class Reply(NamedTuple):
    """One part of an answer."""

    value: Any
    """JSON, not checked yet: a host may send anything."""
    data: bytes


@dataclass(frozen=True, slots=True)
class Question(Generic[T]):
    """A function of skyfab.host.ask, and how its answer is read."""

    name: str
    parse: Callable[[Host, Iterator[Reply]], T]
    """Called with the replies as they arrive. Raises ValueError, KeyError or TypeError for what is not an answer."""
    arguments: Mapping[str, Any] = field(default_factory=dict)


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


def only(replies: Iterator[Reply]) -> Any:
    """The value of an answer that has one part."""
    found = [reply.value for reply in replies]
    if len(found) != 1:
        raise ValueError(f"{len(found)} values instead of one")
    return found[0]


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
        self._closed = False
        self.lines = {host.name: _Line(host, self) for host in hosts}
        self._shared: Mapping[str, _Line] = {}

    def __enter__(self) -> Asker:
        return self

    def stop(self) -> None:
        """Withdraws all questions: the threads that wait for a host stop soon. Thread-safe."""
        self._closed = True

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
        return self._closed or time.monotonic() > self._until

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
        """The connection to a host, for another purpose: its `open` runs a command there without another login.

        None if it has none, or did not use it for long.
        """
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
        self._frames: _Frames | None = None
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

    def _open(self) -> _Frames:
        self._asker.events.emit(HostState(host=self._host.name, state="connecting"))
        try:
            stream = retry(self._log_in, self._asker.is_over)
        except SkyfabError as error:
            if not self._asker.is_over():
                detail = error.message.partition("\n")[0]
                self._asker.events.emit(HostState(host=self._host.name, state="failed", detail=detail))
            raise
        self._frames = _Frames(self._host, stream, lambda: self._asker.is_over())  # noqa: PLW0108  # there will be others
        if self._asker.is_over():
            raise HostLost("the question was cancelled", host=self._host.name)
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
            frames.stream.close()
        if transport is not None:
            transport.close()

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
            if frames is None or transport is None or time.monotonic() - frames.heard > _IDLE:
                return None
            self._frames = self._transport = None
            return _Taken(frames, transport)


def _is_direct(host: Host, inventory: Inventory) -> bool:
    """Whether ssh connects to the host itself. Else the time includes logins elsewhere, which may ask for passwords."""
    if host.transport == "local" or inventory.jump_chain(host):
        return False
    return host.jump == "none" or known_settings(host).keys().isdisjoint(("proxyjump", "proxycommand"))


class _Frames:
    """Questions and replies on one stream, with heartbeats while an answer is awaited."""

    def __init__(self, host: Host, stream: Stream, stopped: Callable[[], bool]) -> None:
        self.stream = stream
        self.has_replied = False
        """Whether anything of the answer to the last question has arrived."""
        self.answered = time.monotonic()
        """When a part of the answer has arrived, or the question was sent. Heartbeats do not count."""
        self.heard = 0.0
        """When anything has arrived."""
        self._has_started = False
        self._host = host
        self._deadline = Deadline(host, float("inf"), stopped)
        self._reader = Reader(self)
        self._number = 0
        self._replies: list[tuple[dict[str, Any], bytes]] = []

    def ask(self, question: Question[T]) -> T:
        """Raises HostLost, HostUnfit or ProtocolError; nothing can be asked afterwards."""
        self.has_replied = False
        self._number += 1
        self.send(question.name, question.arguments)
        parts = self._parts(question.name)
        try:
            answer = question.parse(self._host, parts)
            for _ in parts:  # up to its end
                pass
        except _INVALID as error:
            what = f"invalid reply to {question.name!r}: {error}"
            raise ProtocolError(what, host=self._host.name) from error
        return answer

    def send(self, name: str, arguments: Mapping[str, Any]) -> None:
        content = json.dumps({"name": name, "arguments": dict(arguments)}).encode()
        self._send(frame(HEAD, self._number, content))

    def _send(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest:
            try:
                rest = rest[self.stream.send([rest]) :]
            except BlockingIOError:
                self._deadline.a_moment(self.stream, room=True)
            except OSError:
                raise self._explain() from None

    def _parts(self, name: str) -> Iterator[Reply]:
        self.heard = beat = self.answered = time.monotonic()
        while True:
            replies, self._replies = self._replies, []
            for about, data in replies:
                if about.get("end"):
                    return
                if "error" in about:
                    raise _failure(name, about, self._host)
                yield Reply(about.get("value"), data)
            self._deadline.check()
            try:
                if not self._reader.pump(self.stream.recv_into):
                    raise self._explain()
                self.heard = time.monotonic()
            except ProtocolError as error:
                error.host = self._host.name
                raise
            except BlockingIOError:
                if time.monotonic() - self.heard > _SILENCE:
                    raise HostLost(f"no response for {_SILENCE:.0f} s", host=self._host.name) from None
                self._deadline.a_moment(self.stream)
            if time.monotonic() - beat > _HEARTBEAT:  # also while output arrives: the host hears nothing else
                beat = time.monotonic()
                self._send(frame(PING))

    def _explain(self) -> Exception:
        error = self.stream.explain()
        return error if self._has_started else cannot_run(error, self._host)

    # ---- what the frames' reader calls

    def place(self, stream: int, length: int) -> memoryview:
        raise ProtocolError("data without a reply", host=self._host.name)

    def arrived(self, kind: int, stream: int, payload: memoryview, head: int) -> None:
        self._has_started = True
        if kind != HEAD or stream != self._number:
            return
        self.has_replied = True
        self.answered = time.monotonic()
        end = head or len(payload)
        try:
            about = json.loads(bytes(payload[:end]))
        except (ValueError, RecursionError):
            about = None
        if not isinstance(about, dict):
            raise ProtocolError("a reply is not a JSON object", host=self._host.name)
        self._replies.append((about, bytes(payload[end:])))


def _failure(name: str, about: Mapping[str, Any], host: Host) -> SkyfabError:
    number = about.get("errno")
    hint = CACHE_HINT if number in _STORAGE else None
    if not isinstance(number, int):
        hint = "please report this, with the output of skyfab doctor --paste"
    return HostUnfit(f"{name} failed: {str(about['error'])[:4000]}", host=host.name, hint=hint)


class _Taken:
    """A connection on which questions were answered, as a transport whose first command needs no login."""

    def __init__(self, frames: _Frames, transport: Transport) -> None:
        self._frames: _Frames | None = frames
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
            self._frames.stream.close()
        self._transport.close()
