"""Exchanges between the client and calls that run in a worker: values of generators, and of arguments that are streams.

The client asks, with one Exchange for several values; the worker replies when it has some. So a generator never runs
further ahead than the client has asked for, and an argument is never sent further ahead than it has been read.
"""

from __future__ import annotations

import itertools
import select
import signal
import threading
import time
from collections import deque

from skyfab.protocol import codec, messages

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, Final, Protocol
else:
    Protocol = object

_LARGE: Final = 32 * 1024
"""Values of more bytes are sent one by one."""
_BATCH: Final = 2 * 1024 * 1024
"""Bytes of small values in one reply."""
_QUICK: Final = 0.0002
"""Seconds that a generator takes for a value which is sent immediately. Values that come faster are collected."""
_PATIENCE: Final = 0.001
"""Seconds after which collected values are sent although the message is not full."""
_IDLE: Final = 20
"""How often the thread that sends them finds nothing before it sleeps."""
_DONE: Final = messages.Yielded().encode()


class Worker(Protocol):
    """The part of a worker that exchanges use."""

    source: int
    encoding: Any
    """Encodes values: pickles them, or as plain data."""
    plain: bool

    def read(self) -> bool:
        """Handles what is received next. Returns False if there is nothing more."""

    def send(self, stream: int, message: bytes, payload: codec.Payload | None = None) -> None:
        """Sends a message on a stream."""

    def flush(self) -> None:
        """Writes what was printed."""


class Exchanges:
    """The exchanges of one worker. Any of its threads may wait for one; one thread at a time reads for all."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.encode = worker.encoding.dumps
        self._ready = select.poll()
        self._ready.register(worker.source, select.POLLIN)
        self._lock = threading.Lock()
        """Held while an exchange is added to a call, or the call ends: each exchange has a reply."""
        self._changed = threading.Condition()
        self._reader: int | None = None
        """The thread that reads."""
        self._at_end = False
        self.inside: list[int] = []
        """Exchanges that functions have in progress, in which nothing may be interrupted."""
        self.talks: dict[int, Talk] = {}
        """The calls that exchange something, by stream."""
        self._local = threading.local()
        self._numbers = itertools.count(1)

    def enter(self, stream: int) -> Talk | None:
        """This thread begins a call, and unpickles its arguments."""
        self._local.talk = talk = self.talks.get(stream)
        return talk

    def argument(self, number: int) -> Argument:
        talk: Talk | None = self._local.talk
        if talk is None:
            raise RuntimeError("this call has no streams")
        return talk.argument(number)

    def ask(self, request: tuple[Any, ...]) -> Any:
        """Asks the client, in an exchange that belongs to no call; the reply is the only value of an argument."""
        talk = self.talks.setdefault(0, Talk(self, 0, 0))
        number = next(self._numbers)
        payload = self.encode((number, *request))
        self.inside.append(number)
        try:
            talk.request(payload)
            return next(talk.argument(number))
        finally:
            self.inside.remove(number)
            talk.forget(number)

    def open(self, stream: int, ask: int) -> None:
        """A call has arrived that exchanges something, and is asked for this many values."""
        self.talks[stream] = Talk(self, stream, ask)

    def end(self, stream: int) -> None:
        """A call has ended: replies to its exchanges that have no reply."""
        with self._lock:
            talk = self.talks.pop(stream, None)
            asked = [] if talk is None else list(talk.unanswered())
        for one in asked:
            self.done(one)

    def done(self, stream: int) -> None:
        self._worker.send(stream, _DONE)

    def yielded(self, stream: int, values: list[codec.Payload]) -> None:
        """Replies with values; without any, the client must ask again."""
        if len(values) == 1:
            payload = values[0]
            parts = (len(payload.data), *map(len, payload.buffers))
        else:
            payload = codec.Payload(b"".join(value.data for value in values))
            parts = tuple(len(value.data) for value in values)
        self._worker.flush()
        message = messages.Yielded.head(parts=parts, count=len(values), plain=self._worker.plain)
        self._worker.send(stream, message, payload)

    def take(self, stream: int, message: messages.Exchange, buffers: list[memoryview]) -> None:
        """An exchange has arrived."""
        with self._lock:
            talk = self.talks.setdefault(0, Talk(self, 0, 0)) if not message.call else self.talks.get(message.call)
            if talk is not None:
                talk.take(stream, message, buffers)
        if talk is None:
            self.done(stream)

    def read_until(self, ready: Callable[[], object]) -> bool:
        """Reads until `ready()`, or waits while another thread reads. False: nothing more can be received."""
        me = threading.get_ident()
        with self._changed:
            while not ready():
                if self._at_end:
                    return False
                if self._reader is not None:
                    self._changed.wait()
                    continue
                self._reader = me
                self._changed.release()
                try:
                    more = self._worker.read()
                finally:
                    self._changed.acquire()
                    self._reader = None
                    self._changed.notify_all()
                self._at_end = not more
        return True

    def interrupted(self) -> None:
        """SIGINT has arrived, on the main thread: the client closes a generator that may be running there."""
        if self._reader is not None or self.inside or not any(talk.runs_here for talk in self.talks.values()):
            return  # the reason is read without this, and what was interrupted may hold a lock
        while self._ready.poll(0) and self._worker.read():
            pass
        for talk in list(self.talks.values()):
            talk.interrupt()


class Talk:
    """The exchanges of one call."""

    def __init__(self, exchanges: Exchanges, stream: int, ask: int) -> None:
        self._exchanges = exchanges
        self._stream = stream
        self.is_closed = False
        self._closers: list[int] = []
        self._asked: deque[tuple[int, int]] = deque([(stream, ask)] if ask else [])
        """Requests for values: the stream, and how many at most. The first is part of the call itself."""
        self._arguments: dict[int, Argument] = {}
        self._values: list[codec.Payload] = []
        """Small values that are collected for the first request."""
        self._size = 0
        self._has_sent = False
        self._lock = threading.Lock()
        """Protects what is collected: two threads send it."""
        self._collected: threading.Semaphore | None = None
        self._is_watched = False
        """Another thread regularly checks whether something is collected."""
        self.unpicklable = ""
        """The type of a value that cannot be pickled; then `generate` has raised the error."""
        self._runs_on: int | None = None
        """The thread on which the generator runs at this moment."""

    def take(self, stream: int, message: messages.Exchange, buffers: list[memoryview]) -> None:
        """An exchange has arrived. Runs on the thread that reads."""
        if message.what == "next":
            self._asked.append((stream, message.count))
        elif message.what == "close":
            self.is_closed = True
            self._closers.append(stream)
            if self._runs_on not in (None, threading.get_ident()):
                signal.raise_signal(signal.SIGINT)  # its handler runs on the main thread
        else:
            self.argument(message.number).take(stream, message, buffers)

    def unanswered(self) -> Iterator[int]:
        """The streams of exchanges that have no reply."""
        yield from self._closers
        yield from (stream for stream, _ in self._asked if stream != self._stream)
        for argument in self._arguments.values():
            yield from argument.unanswered()

    def argument(self, number: int) -> Argument:
        """One of the call's arguments that are streams."""
        return self._arguments.setdefault(number, Argument(self))

    @property
    def runs_here(self) -> bool:
        """Its generator runs on this thread at this moment."""
        return self._runs_on == threading.get_ident()

    def interrupt(self) -> None:
        """Ends a generator that runs on this thread, if it was closed."""
        if self.is_closed and self.runs_here:
            self._runs_on = None  # once
            raise GeneratorExit

    def request(self, payload: codec.Payload) -> None:
        """Sends one value as soon as the client asks for it."""
        sent = False
        while not sent:
            self.wait(lambda: self._asked)
            with self._lock:
                if self._asked:
                    stream, _ = self._asked.popleft()
                    sent = True
        self._exchanges.yielded(stream, [payload])

    def forget(self, number: int) -> None:
        """An argument is no longer needed."""
        del self._arguments[number]

    def wait(self, ready: Callable[[], object]) -> None:
        """Waits for something that the client sends. Raises GeneratorExit if it closes the generator instead."""
        runs_on, self._runs_on = self._runs_on, None
        if not self._exchanges.read_until(lambda: ready() or self.is_closed):
            raise EOFError("the agent of this host has ended")
        self._runs_on = runs_on
        if self.is_closed and not ready():
            raise GeneratorExit

    # ---- values of a generator

    def generate(self, values: Iterator[Any]) -> None:
        """Runs a generator, one step for each value that the client asks for. Raises what it raises."""
        try:
            while not self.is_closed:
                if self._asked:
                    self._step(values)
                else:
                    self._exchanges.read_until(lambda: self._asked or self.is_closed)
        except StopIteration:
            pass
        except GeneratorExit:
            if not self.is_closed:
                raise
        finally:
            with self._lock:
                self._send()
            close = getattr(values, "close", None)
            if close is not None:
                close()

    def _step(self, values: Iterator[Any]) -> None:
        began = time.monotonic()
        self._runs_on = threading.get_ident()
        try:
            value = next(values)
        finally:
            self._runs_on = None
        quick = time.monotonic() - began < _QUICK
        try:
            payload = self._exchanges.encode(value)
        except Exception:
            self.unpicklable = type(value).__qualname__
            raise
        self._put(payload, quick=quick and self._has_sent)

    def was_read(self, stream: int) -> None:
        """The values of an exchange were read: the client may send more."""
        self._exchanges.inside.append(stream)
        try:
            self._exchanges.done(stream)
        finally:
            self._exchanges.inside.remove(stream)

    def _put(self, payload: codec.Payload, *, quick: bool) -> None:
        """Sends a value, or collects those that come quickly."""
        size = payload.size
        large = bool(payload.buffers) or size > _LARGE
        if large:
            with self._lock:
                self._send()
                if self._asked and self._asked[0][0] == self._stream:  # only small values are sent with the call
                    self._asked.popleft()
                    self._exchanges.yielded(self._stream, [])
        while not self.is_closed:
            with self._lock:
                if self._asked:
                    self._values.append(payload)
                    self._size += size
                    full = large or len(self._values) >= self._asked[0][1] or self._size >= _BATCH
                    if full or not quick:
                        self._send()
                    elif not self._is_watched:
                        self._watch()
                    return
            # What was collected has been sent by the other thread, or just now.
            self._exchanges.read_until(lambda: self._asked or self.is_closed)

    def _watch(self) -> None:
        """Has another thread send what is collected, if it is not sent soon."""
        self._is_watched = True
        if self._collected is None:
            self._collected = threading.Semaphore(0)
            threading.Thread(target=self._send_soon, args=(self._collected,), daemon=True).start()
        self._collected.release()

    def _send_soon(self, collected: threading.Semaphore) -> None:
        while self._stream in self._exchanges.talks:
            if not collected.acquire(timeout=1.0):
                continue
            found: list[codec.Payload] | None = None
            idle = 0
            while idle < _IDLE:
                time.sleep(_PATIENCE)
                with self._lock:
                    if found is self._values:
                        self._send()
                    idle = 0 if self._values else idle + 1
                    found = self._values or None
                    self._is_watched = idle < _IDLE

    def _send(self) -> None:
        """Sends what was collected, with the lock held."""
        if not self._values:
            return
        values, self._values, self._size = self._values, [], 0
        stream, _ = self._asked.popleft()  # values are collected only if there is one
        self._exchanges.yielded(stream, values)
        self._has_sent = True


class Argument:
    """An argument that is a stream: an iterator over the values that the client sends."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._given: deque[tuple[int, deque[list[memoryview]]]] = deque()
        """What has arrived: the stream of each exchange, and its values."""
        self._end: tuple[int, list[memoryview]] | None = None

    def take(self, stream: int, message: messages.Exchange, buffers: list[memoryview]) -> None:
        if message.what == "end":
            self._end = (stream, buffers)
        else:
            values = [buffers] if message.count == 1 else [[buffer] for buffer in buffers]
            self._given.append((stream, deque(values)))

    def unanswered(self) -> Iterator[int]:
        yield from (stream for stream, _ in self._given)
        if self._end is not None:
            yield self._end[0]

    def __iter__(self) -> Argument:
        return self

    def __next__(self) -> Any:
        if not self._given and self._end is None:
            self._talk.wait(lambda: self._given or self._end is not None)
        if self._given:
            stream, values = self._given[0]
            data, *buffers = values.popleft()
            if not values:
                self._given.popleft()
                self._talk.was_read(stream)
            return codec.loads(data, buffers)
        assert self._end is not None
        if self._end[1]:
            data, *buffers = self._end[1]
            raise codec.loads(data, buffers)
        raise StopIteration
