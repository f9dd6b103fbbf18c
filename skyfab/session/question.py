"""A question to a host and its answer, and the stream on which a host is asked one question after another."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, TypeVar

from skyfab.errors import HostLost, HostUnfit, ProtocolError, SkyfabError
from skyfab.inventory.host import Host
from skyfab.protocol.frames import HEAD, PING, Reader, frame
from skyfab.session.bootstrap import CACHE_HINT, cannot_run
from skyfab.session.shell import Deadline
from skyfab.ssh.base import Stream

T = TypeVar("T")

_STORAGE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
"""Errors of the cache folder."""
_INVALID: Final = (ValueError, KeyError, TypeError, AttributeError, RecursionError, StopIteration, OverflowError)
"""What reading an invalid answer raises."""
_SILENCE: Final = 60.0
"""Seconds without a frame of the host after which it is lost: it answers each heartbeat."""


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


def only(replies: Iterator[Reply]) -> Any:
    """The value of an answer that has one part."""
    found = [reply.value for reply in replies]
    if len(found) != 1:
        raise ValueError(f"{len(found)} values instead of one")
    return found[0]


class QuestionStream:
    """Questions and replies on one stream."""

    def __init__(self, host: Host, stream: Stream, stopped: Callable[[], bool]) -> None:
        self.stream = stream
        self.has_replied = False
        """Whether anything of the answer to the last question has arrived."""
        self.answered = time.monotonic()
        """When a part of the answer has arrived, or the question was sent. Heartbeats do not count."""
        self._sending = threading.Lock()
        self._is_beating = True
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
        with self._sending:
            while rest:
                try:
                    rest = rest[self.stream.send([rest]) :]
                except BlockingIOError:
                    self._deadline.a_moment(self.stream, room=True)
                except OSError:
                    raise self._explain() from None

    def beat(self) -> None:
        """Sends a heartbeat, unless something else is being sent. An error is for the thread that asks."""
        if self._sending.acquire(blocking=False):
            try:
                if self._is_beating:
                    self._send_heartbeat()
            except OSError:
                pass
            finally:
                self._sending.release()

    def _send_heartbeat(self) -> None:
        self.stream.send([frame(PING)])  # as a whole or not at all: it is short

    def stop_beating(self) -> None:
        """The stream gets another use, or is closed."""
        with self._sending:
            self._is_beating = False

    def close(self) -> None:
        self.stop_beating()
        self.stream.close()

    def _parts(self, name: str) -> Iterator[Reply]:
        heard = self.answered = time.monotonic()
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
                heard = time.monotonic()
            except ProtocolError as error:
                error.host = self._host.name
                raise
            except BlockingIOError:
                if time.monotonic() - heard > _SILENCE:
                    raise HostLost(f"no response for {_SILENCE:.0f} s", host=self._host.name) from None
                self._deadline.a_moment(self.stream)

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
