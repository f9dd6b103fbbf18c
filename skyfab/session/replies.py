"""Handles what is received from a host: replies go to pending requests, output and process exits to the listener.

Everything here runs with the connection's lock held; callbacks are collected and run later, without the lock.
"""

from __future__ import annotations

import copy
import functools
import ipaddress
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from skyfab._util.signals import SIGNAL_GUARD
from skyfab.errors import HostError, HostUnfit, ProtocolError
from skyfab.protocol import VERSION, messages
from skyfab.protocol.blobs import Assembly, split
from skyfab.protocol.messages import AgentHello, Message
from skyfab.protocol.mux import Mux
from skyfab.session.lines import Lines

_MEMORY: Final = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
"""A host may not announce more data than this machine has memory."""
_MOST_OUTPUTS: Final = 4096
"""The maximum number of output streams: two for each process."""
_MOST_ENDED: Final = 1024
"""Output streams kept after their process has ended: the exit message can arrive before its last output."""
_MOST_GPUS: Final = 1024

_SMALL_RESULT: Final = messages.Result(parts=())
"""Stands for a result of one part, the most common reply: it is neither decoded nor split."""

Kind = Literal["stdout", "stderr"]
KINDS: Final[tuple[Kind, ...]] = ("stdout", "stderr")
Answer = Callable[[Message, list[memoryview]], None]
Failure = Callable[[Exception], None]


class Listener(Protocol):
    """Receives what a host sends without a request."""

    def on_output(self, worker: str, lines: Lines) -> None:
        """A worker's process wrote these lines."""

    def on_import(self, worker: str, module: str) -> None:
        """A worker imports this package; none if it is empty."""

    def on_exit(self, worker: str, generation: int) -> None:
        """A worker's process ended."""

    def on_lost(self, error: HostError) -> None:
        """The host is lost."""

    def on_disconnect(self, reason: str) -> None:
        """The connection is lost; a reconnect is attempted."""

    def on_reconnect(self, seconds: float) -> None:
        """The connection was restored after this many seconds."""

    def others_respond(self) -> bool:
        """Whether other hosts respond, which means that the network of this machine works."""


@dataclass(slots=True)
class PendingRequest:
    """A request whose reply has not been received."""

    answer: Answer
    failure: Failure
    worker: str | None = None
    message: Message | None = None
    assembly: Assembly | None = None


class Reply:
    """The reply to a request, for which a thread waits. It can be the `Caller` of a call (pool/node.py)."""

    __slots__ = ("_arrived", "_error", "_found", "_then", "is_there", "stream")

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        """`then` is called when the reply arrives, whether the thread still waits or not."""
        self.stream = 0
        self.is_there = False
        """It was received, or never will be."""
        self._found: tuple[Message, list[memoryview]] | None = None
        self._error: Exception | None = None
        self._then = then
        self._arrived = threading.Lock()
        """Held until the reply is there."""
        self._arrived.acquire()

    def is_wanted(self) -> bool:
        return True

    def sent(self, stream: int) -> None:
        self.stream = stream

    def answered(self, message: Message, buffers: list[memoryview]) -> None:
        self._found = (message, buffers)
        self.is_there = True
        self._then()
        self._arrived.release()

    def failed(self, error: Exception) -> None:
        self._error = error
        self.is_there = True
        self._then()
        self._arrived.release()

    def block(self) -> None:
        """Waits for the reply; another thread reads."""
        if not self.is_there:
            SIGNAL_GUARD.acquire(self._arrived)

    def wait(self) -> tuple[Message, list[memoryview]]:
        """Waits for the reply. Raises HostLost if the host is lost before."""
        self.block()
        return self.found

    @property
    def found(self) -> tuple[Message, list[memoryview]]:
        """The reply, which has arrived. Raises the error if there is none."""
        if self._found is None:
            assert self._error is not None
            raise self._error
        return self._found


class Replies:
    """The receiving half of a connection."""

    def __init__(self, host: str, listener: Listener, clock: Callable[[], float]) -> None:
        self.mux = Mux(self, clock=clock)
        self.agent: AgentHello | None = None
        """The agent's description of itself."""
        self.hellos = 0
        """The number of hellos received: one for each stream."""
        self.is_done = False
        """Whether the agent has cleaned up and ends. End of file follows, but late if a login script left a process."""
        self.pending: dict[int, PendingRequest] = {}
        self._host = host
        self._listener = listener
        self._output: dict[int, tuple[str, Lines]] = {}
        self._streams: dict[tuple[str, Kind], int] = {}
        """The stream number of each worker's stdout and stderr."""
        self._ended: dict[int, None] = {}
        """Streams of processes that have ended, oldest first."""
        self._partial: set[int] = set()
        """Streams whose last line is incomplete."""
        self.after: list[Callable[[], None]] = []

    def take(self) -> list[Callable[[], None]]:
        """Returns and clears the callbacks to run without the lock."""
        after, self.after = self.after, []
        return after

    def end(self, error: Exception, *, lost: HostError | None) -> None:
        """Nothing more will be received: fails all pending requests."""
        if lost is not None:  # first: callbacks of failed requests must find the host marked as lost
            self.after.append(functools.partial(self._listener.on_lost, lost))
        pending, self.pending = self.pending, {}
        for request in pending.values():
            self.after.append(functools.partial(request.failure, copy.copy(error)))

    # ---- callbacks of the mux

    def hello(self, payload: bytes) -> None:
        hello = messages.expect(AgentHello, payload)
        if hello.protocol != VERSION:
            raise HostUnfit(f"its agent has protocol version {hello.protocol}, this program {VERSION}", host=self._host)
        if not (0 <= hello.gpus <= _MOST_GPUS and _is_address(hello.address)):
            raise ProtocolError("its agent reports an invalid address or number of GPUs")
        self.agent = hello
        self.hellos += 1
        self.mux.resume(hello.received)

    def bye(self, reason: str) -> None:
        self.is_done = reason == "done"

    def opened(self, stream: int, head: bytes, data: memoryview | None) -> None:
        request = self.pending.get(stream)
        if request is not None and data is not None and head == messages.Result.head(parts=(len(data),)):
            self._complete(stream, request, _SMALL_RESULT, [memoryview(bytes(data))])
            return
        message = messages.decode(head)
        if request is not None:
            parts = getattr(message, "parts", ())
            if data is not None:
                self._complete(stream, request, message, split(parts, data))
            else:
                request.message = message
                request.assembly = Assembly(parts, limit=_MEMORY)
                if not request.assembly.missing:  # a long head without data
                    self._complete(stream, request, message, request.assembly.buffers())
        elif isinstance(message, messages.Log):
            self._on_log(stream, message)
        elif isinstance(message, messages.Importing):
            self.after.append(lambda: self._listener.on_import(message.worker, message.module))
        elif isinstance(message, messages.Exited):
            self._flush_lines(message.worker)
            self._end_output(message.worker)
            self.after.append(lambda: self._listener.on_exit(message.worker, message.generation))

    def place(self, stream: int, length: int) -> memoryview:
        request = self.pending.get(stream)
        if request is not None and request.assembly is not None:
            return request.assembly.place(length)
        return memoryview(bytearray(length))

    def data(self, stream: int, view: memoryview) -> None:
        request = self.pending.get(stream)
        if request is not None:
            if request.assembly is None or request.message is None:
                raise ProtocolError("data before its message")
            self.mux.used(stream, len(view))
            if request.assembly.advance(len(view)):
                self._complete(stream, request, request.message, request.assembly.buffers())
        elif stream in self._output:
            self.mux.used(stream, len(view))
            worker, lines = self._output[stream]
            if not len(view):  # the process has ended, and this is all that it has written
                self._flush(stream)
                return
            if complete := lines.feed(bytes(view)):
                self.after.append(lambda: self._listener.on_output(worker, complete))
            if lines.partial:
                self._partial.add(stream)
            else:
                self._partial.discard(stream)

    def _on_log(self, stream: int, log: messages.Log) -> None:
        """Opens an output stream; the worker's previous process, if any, writes nothing more."""
        kind: Kind = "stdout" if log.fd == 1 else "stderr"
        for old in {self._streams.get((log.worker, kind)), stream}:
            if old in self._output:
                self._drop(old)
        if len(self._output) - len(self._ended) >= _MOST_OUTPUTS:
            raise ProtocolError(f"more than {_MOST_OUTPUTS} output streams")
        self._streams[log.worker, kind] = stream
        self._output[stream] = (log.worker, Lines(kind))

    def _end_output(self, worker: str) -> None:
        """A process has ended: keeps its streams until more than `_MOST_ENDED` others have ended."""
        for kind in KINDS:
            stream = self._streams.get((worker, kind))
            if stream is not None:
                self._ended[stream] = None
        while len(self._ended) > _MOST_ENDED:
            self._drop(next(iter(self._ended)))

    def _drop(self, stream: int) -> None:
        worker, lines = self._output.pop(stream)
        self._streams.pop((worker, lines.stream), None)
        self._ended.pop(stream, None)
        self._partial.discard(stream)
        self.mux.forget(stream)

    def _complete(self, stream: int, request: PendingRequest, message: Message, buffers: list[memoryview]) -> None:
        del self.pending[stream]
        self.mux.forget(stream)
        if self._partial and request.worker is not None:
            self._flush_lines(request.worker)
        self.after.append(functools.partial(request.answer, message, buffers))

    def _flush_lines(self, worker: str) -> None:
        """A call has ended: shows its incomplete last line, too."""
        for kind in KINDS:
            if (stream := self._streams.get((worker, kind))) is not None:
                self._flush(stream)

    def _flush(self, stream: int) -> None:
        """Shows the incomplete last line of a stream, if there is one."""
        if stream in self._partial:
            self._partial.discard(stream)
            worker, lines = self._output[stream]
            self.after.append(functools.partial(self._listener.on_output, worker, lines.rest()))


def _is_address(text: str) -> bool:
    """Whether it is an IP address, which is safe to show in a shell command."""
    place, percent, interface = text.partition("%")
    try:
        ipaddress.ip_address(place)
    except ValueError:
        return False
    return not percent or re.fullmatch(r"[\w.-]+", interface) is not None
