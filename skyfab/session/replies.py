"""The inbox: what arrives from a host, sorted. Answers go to those who asked, lines and endings to the listener.

Everything here runs with the session's lock held; what others must be told is collected, and told without it.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from skyfab.errors import HostError, HostUnfit, ProtocolError
from skyfab.protocol import VERSION, messages
from skyfab.protocol.blobs import Assembly, split
from skyfab.protocol.frames import HEADER
from skyfab.protocol.messages import AgentHello, Message
from skyfab.protocol.mux import Mux
from skyfab.session.lines import Lines

_MEMORY: Final = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
"""A host may not announce more than this machine could hold."""
_MOST_OUTPUTS: Final = 4096
"""Streams on which processes write: two each."""
_MOST_ENDED: Final = 1024
"""Those of processes that have ended and may have more to tell: an ending overtakes what was written before it."""
_MOST_GPUS: Final = 1024
_MOST_CPUS: Final = 65536

Kind = Literal["stdout", "stderr"]
KINDS: Final[tuple[Kind, ...]] = ("stdout", "stderr")
Answer = Callable[[Message, list[memoryview]], None]
Failure = Callable[[Exception], None]


class Listener(Protocol):
    """Who hears what a host says without being asked."""

    def on_output(self, worker: str, lines: Lines) -> None:
        """A seat's process wrote these lines."""

    def on_exit(self, worker: str, generation: int) -> None:
        """A seat's process ended."""

    def on_lost(self, error: HostError) -> None:
        """The host is gone."""

    def on_disconnect(self, reason: str) -> None:
        """The connection is gone, and another one is tried."""

    def on_reconnect(self, seconds: float) -> None:
        """It is there again, after so long."""

    def others_respond(self) -> bool:
        """Whether the network of this machine works: other hosts are heard."""


@dataclass(slots=True)
class PendingRequest:
    """A request whose answer is awaited."""

    answer: Answer
    failure: Failure
    worker: str | None = None
    message: Message | None = None
    assembly: Assembly | None = None


class Reply:
    """The answer to a small request, read by the thread that waits for it."""

    __slots__ = ("_left", "assembly", "error", "found", "message", "reader", "stream", "value", "worker")

    def __init__(self, stream: int, worker: str) -> None:
        self.stream = stream
        self.worker = worker
        self.message: Message | None = None
        self.assembly: Assembly | None = None
        self.reader = threading.get_ident()
        self._left: list[Callable[[], None]] | None = None
        self.value: bytes | None = None
        """A small result's pickle, as most answers are."""
        self.found: tuple[Message, list[memoryview]] | None = None
        """Any other answer."""
        self.error: Exception | None = None

    def answer(self, message: Message, buffers: list[memoryview]) -> None:
        self.found = (message, buffers)
        self._tell()

    def failure(self, error: Exception) -> None:
        self.error = error
        self._tell()

    def leave(self, then: Callable[[], None]) -> None:
        """Its thread waits no longer; `then` is called when it comes."""
        self.reader = 0
        self._left = [then]
        if self.is_there():  # in this very moment
            self._tell()

    def _tell(self) -> None:
        if self._left:
            with contextlib.suppress(IndexError):  # another thread was faster
                self._left.pop()()

    def is_there(self) -> bool:
        return self.value is not None or self.found is not None or self.error is not None


class Replies:
    """The receiving half of a session."""

    def __init__(self, host: str, listener: Listener, clock: Callable[[], float]) -> None:
        self.mux = Mux(self, fastpath=self._fastpath, clock=clock)
        self.agent: AgentHello | None = None
        """What the host said of itself."""
        self.hellos = 0
        """How often it said hello: once on each connection."""
        self.pending: dict[int, PendingRequest | Reply] = {}
        self._host = host
        self._listener = listener
        self._output: dict[int, tuple[str, Lines]] = {}
        self._streams: dict[tuple[str, Kind], int] = {}
        """The stream of each seat's stdout and stderr."""
        self._ended: dict[int, None] = {}
        """Streams of processes that have ended, the first one first."""
        self._partial: set[int] = set()
        """Streams whose last line has no end yet."""
        self.after: list[Callable[[], None]] = []

    def take(self) -> list[Callable[[], None]]:
        """What is to be told now, without the lock."""
        after, self.after = self.after, []
        return after

    def end(self, error: Exception, *, lost: HostError | None) -> None:
        """Nothing more comes: everybody who waits is told."""
        if lost is not None:  # first: who hears of a failure finds the host marked
            self.after.append(functools.partial(self._listener.on_lost, lost))
        pending, self.pending = self.pending, {}
        for exchange in pending.values():
            self.after.append(functools.partial(exchange.failure, error))

    # ---- what the mux tells

    def hello(self, payload: bytes) -> None:
        hello = messages.expect(AgentHello, payload)
        if hello.protocol != VERSION:
            raise HostUnfit(f"its agent speaks protocol {hello.protocol}, not {VERSION}", host=self._host)
        if not (0 <= hello.gpus <= _MOST_GPUS and 0 <= hello.cpus <= _MOST_CPUS and _is_address(hello.address)):
            raise ProtocolError("its agent says of itself what cannot be")
        self.agent = hello
        self.hellos += 1
        self.mux.resume(hello.received)

    def bye(self, reason: str) -> None:
        pass  # the end of the stream follows

    def opened(self, stream: int, head: bytes, data: memoryview | None) -> None:
        message = messages.decode(head)
        exchange = self.pending.get(stream)
        if exchange is not None:
            parts = getattr(message, "parts", ())
            if data is not None:
                self._complete(stream, exchange, message, split(parts, data))
            else:
                exchange.message = message
                exchange.assembly = Assembly(parts, limit=_MEMORY)
                if not exchange.assembly.missing:  # a long head, and nothing else
                    self._complete(stream, exchange, message, exchange.assembly.buffers())
        elif isinstance(message, messages.Log):
            self._hear(stream, message)
        elif isinstance(message, messages.Exited):
            self._flush_lines(message.worker)
            self._end_output(message.worker)
            self.after.append(lambda: self._listener.on_exit(message.worker, message.generation))

    def _fastpath(self, stream: int, frame: memoryview, head: int) -> bool:
        """A small answer that came alone, to the thread that reads: it need not be told of it."""
        reply = self.pending.get(stream)
        if not isinstance(reply, Reply) or reply.reader != threading.get_ident():
            return False
        if self._partial and self._partial_of(reply.worker):
            return False
        start = HEADER.size + head
        if frame[HEADER.size : start] == messages.result_head(len(frame) - start):
            reply.value = bytes(frame[start:])
        else:
            message = messages.decode(bytes(frame[HEADER.size : start]))
            reply.found = (message, split(getattr(message, "parts", ()), frame[start:]))
        del self.pending[stream]
        return True

    def place(self, stream: int, length: int) -> memoryview:
        exchange = self.pending.get(stream)
        if exchange is not None and exchange.assembly is not None:
            return exchange.assembly.place(length)
        return memoryview(bytearray(length))

    def data(self, stream: int, view: memoryview) -> None:
        exchange = self.pending.get(stream)
        if exchange is not None:
            if exchange.assembly is None or exchange.message is None:
                raise ProtocolError("data before its message")
            self.mux.used(stream, len(view))
            if exchange.assembly.advance(len(view)):
                self._complete(stream, exchange, exchange.message, exchange.assembly.buffers())
        elif stream in self._output:
            self.mux.used(stream, len(view))
            worker, lines = self._output[stream]
            if complete := lines.feed(bytes(view)):
                self.after.append(lambda: self._listener.on_output(worker, complete))
            if lines.partial:
                self._partial.add(stream)
            else:
                self._partial.discard(stream)

    def _hear(self, stream: int, log: messages.Log) -> None:
        """What a process writes will come on this stream; the one that had its seat before writes no more."""
        kind: Kind = "stdout" if log.fd == 1 else "stderr"
        for old in {self._streams.get((log.worker, kind)), stream}:
            if old in self._output:
                self._drop(old)
        if len(self._output) - len(self._ended) >= _MOST_OUTPUTS:
            raise ProtocolError("more processes than any pool has")
        self._streams[log.worker, kind] = stream
        self._output[stream] = (log.worker, Lines(kind))

    def _end_output(self, worker: str) -> None:
        """A process has ended: its streams are kept for a while, and then not."""
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

    def _complete(
        self, stream: int, exchange: PendingRequest | Reply, message: Message, buffers: list[memoryview]
    ) -> None:
        del self.pending[stream]
        self.mux.forget(stream)
        if exchange.worker is not None:
            self._flush_lines(exchange.worker)
        self.after.append(functools.partial(exchange.answer, message, buffers))

    def _flush_lines(self, worker: str) -> None:
        """A call is over: what it wrote without an end of line is shown too."""
        for stream in self._partial_of(worker):
            self._partial.discard(stream)
            rest = self._output[stream][1].rest()
            self.after.append(functools.partial(self._listener.on_output, worker, rest))

    def _partial_of(self, worker: str) -> list[int]:
        """The seat's streams whose last line has no end yet."""
        return [stream for kind in KINDS if (stream := self._streams.get((worker, kind))) in self._partial]


def _is_address(text: str) -> bool:
    """An IP address, which may be shown in a command for a shell."""
    place, percent, interface = text.partition("%")
    try:
        ipaddress.ip_address(place)
    except ValueError:
        return False
    return not percent or re.fullmatch(r"[\w.-]+", interface) is not None
