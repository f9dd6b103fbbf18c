"""Runs scripts in a POSIX shell on a host, over a stream: used before a Python interpreter is available there.

Every reply of ours is marked with a random word, so that no banner can be mistaken for one.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from skyfab.errors import HostLost, HostUnfit, ProtocolError, Unreachable
from skyfab.inventory.host import Host
from skyfab.protocol.frames import Buffer
from skyfab.ssh.base import Stream
from skyfab.ssh.refusals import by_hand
from skyfab.ui.prompt import TERMINAL

_NOISE: Final = 256 * 1024
"""Bytes that a shell may print before it runs our command."""
START: Final = 30.0
"""Seconds that an interpreter may take to start."""
_KEPT: Final = 8 * 1024 * 1024
"""Bytes of a script's output that are kept."""
_MOST: Final = 256 * 1024 * 1024
"""Bytes that a script may print in total."""


class ScriptFailed(Exception):
    """A script on a host failed; its last output says why."""

    def __init__(self, status: int, output: str) -> None:
        super().__init__(output)
        self.status = status
        self.output = output


@dataclass(slots=True)
class Deadline:
    """The deadline for a host's response; `stopped` cancels the wait."""

    host: Host
    deadline: float
    stopped: Callable[[], bool]
    arrived: Callable[[], None] = lambda: None
    """Called when the host has sent anything: the login is complete."""
    asked: float = field(default_factory=lambda: TERMINAL.spent)
    """When the wait began, the seconds in which the user had been asked for passwords."""

    def a_moment(self, stream: Stream, *, room: bool = False) -> None:
        """Waits briefly until the stream is readable, or writable with `room`. Raises as `check` does."""
        self.check()
        poll = select.poll()
        fd = stream.sink() if room else stream.fileno()
        if fd is not None:
            poll.register(fd, select.POLLOUT if room else select.POLLIN)
        stderr = stream.stderr()
        if stderr is not None:
            poll.register(stderr, select.POLLIN)
        poll.poll(2 if fd is None else 200)
        stream.drain()

    def check(self) -> None:
        """Raises Unreachable when the deadline has passed, HostLost when the wait was cancelled."""
        if self.stopped():
            raise HostLost("the pool was closed", host=self.host.name)
        if time.monotonic() > self.deadline + TERMINAL.spent - self.asked:
            raise Unreachable("no response in time", host=self.host.name, hint=f"try: {by_hand(self.host, 'true')}")


class Shell:
    """Reads marked replies from a stream, and runs scripts in the shell at its other end."""

    def __init__(self, stream: Stream, marker: str, deadline: Deadline) -> None:
        """A script may take as long as it likes: the transport detects a lost connection."""
        self._stream = stream
        self._marker = marker.encode()
        self._deadline = deadline
        self.host = deadline.host
        self.greeting: Callable[[], None] | None = None
        """Reads the shell's first reply, after the first script has been sent: saves a round trip."""

    def check(self) -> None:
        """Raises HostLost when the pool was closed."""
        self._deadline.check()

    def answer(self) -> str | None:
        """Returns the rest of the next marked line; None at end of file.

        Reads byte by byte: what follows the line may be for another reader. The output before it is kept in `noise`.
        """
        seen = self.noise = bytearray()
        at = -1
        one = memoryview(bytearray(1))
        while self._recv(one):
            seen += one
            self._deadline.check()
            if at < 0 and seen.endswith(self._marker):
                at = len(seen)
            elif at >= 0 and one[0] == 10:
                return seen[at:-1].decode(errors="replace")
            if len(seen) > _NOISE:
                raise HostUnfit(
                    "its shell prints endlessly before our command runs",
                    host=self.host.name,
                    hint=f"check what its shell reads at login, and the output of: {by_hand(self.host, 'true')}",
                )
        return None

    def send(self, content: Buffer) -> bool:
        """Sends all of it. Over a slow link that may take long: the deadline is for the host to take more.

        False: the other side no longer reads; its reply says why.
        """
        rest = memoryview(content)
        while rest:
            try:
                rest = rest[self._stream.send([rest]) :]
                self._deadline.deadline = max(self._deadline.deadline, time.monotonic() + START)
            except BlockingIOError:
                self._deadline.a_moment(self._stream, room=True)
            except BrokenPipeError:
                return False
        return True

    # ---- while the shell runs the loop at the end of bootstrap.sh, where `$m` is the marker

    def run(self, script: str, *, feed: Iterable[Buffer] = ()) -> str:
        """Runs a script with `feed` as its standard input; returns its stdout and stderr.

        Raises ScriptFailed, or the transport's error for a lost connection.
        """
        source = "" if feed else " </dev/null"
        # A failed script leaves part of its input unread: no other script can follow.
        end = "; test $s = 0 || exit" if feed else ""
        self._deadline.deadline = max(self._deadline.deadline, time.monotonic() + START)
        self.tell(f'( {script}\n) 2>&1{source}; s=$?; echo "${{m}}done $s"{end}', fed=bool(feed))
        if self.greeting is not None:
            greeting, self.greeting = self.greeting, None
            greeting()
        self._deadline.deadline = float("inf")
        answer = _Answer(self._marker)
        for piece in feed:
            if not self._send_while_silent(piece, answer):
                break
        scratch = memoryview(bytearray(65536))
        while not answer.complete:
            got = self._recv(scratch)
            if not got:
                raise self._stream.explain()
            answer.feed(bytes(scratch[:got]))
        if answer.status:
            raise ScriptFailed(answer.status, answer.text)
        return answer.text

    def go(self, python: str, *, provided: str = "true") -> str | None:
        """Replaces the shell by an interpreter, given as a shell word; returns the reply that `Bootstrap.join` expects.

        ``absent``: the condition `provided` was false.
        """
        self.tell(f'if {provided}; then p={python}; go; fi; echo "${{m}}absent"')
        self._deadline.deadline = time.monotonic() + START
        return self.answer()

    def tell(self, script: str, *, fed: bool = False) -> None:
        """Runs a script in the shell itself; the caller reads its reply, if any."""
        text = script.encode()
        self.send(f"{len(text)}{' fed' if fed else ''}\n".encode() + text)

    def _send_while_silent(self, piece: Buffer, answer: _Answer) -> bool:
        """Sends `piece` unless the script has replied. False: it has, or it has ended."""
        scratch = memoryview(bytearray(4096))
        got = self._try(scratch)
        if got is None:
            return self.send(piece)
        answer.feed(bytes(scratch[:got]))
        return got > 0 and not answer.complete and self.send(piece)

    def _recv(self, view: memoryview) -> int:
        while True:
            got = self._try(view)
            if got is not None:
                self._deadline.arrived()
                return got
            self._deadline.a_moment(self._stream)

    def _try(self, view: memoryview) -> int | None:
        try:
            return self._stream.recv_into(view)
        except BlockingIOError:
            return None


class _Answer:
    """A script's output, up to the marked line with its exit status."""

    def __init__(self, marker: bytes) -> None:
        self._end = marker + b"done "
        self._lines: list[str] = []
        self._size = self._printed = 0
        self._rest = b""
        self.status = 0
        self.complete = False

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-_KEPT:]
        self._printed += len(data)
        if self._printed > _MOST:
            raise ProtocolError(f"a script printed more than {_MOST // 1024**2} MB")
        for line in lines:
            before, marked, status = line.partition(self._end)
            if marked:
                self.status = int(status) if status.isdigit() and len(status) < 9 else 1
                self.complete = True
            if before or not marked:
                self._keep(before.decode(errors="replace"))

    def _keep(self, line: str) -> None:
        self._size += len(line) + 1
        if self._size <= _KEPT:
            self._lines.append(line)

    @property
    def text(self) -> str:
        return "\n".join(self._lines)
