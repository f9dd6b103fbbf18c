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
from _thread import start_new_thread
from collections import deque

from skyfab.errors import RemoteTraceback
from skyfab.protocol import codec, messages
from skyfab.protocol.batches import Batch, as_group, of_group

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, Final

_QUICK: Final = 0.0002
"""Seconds that a generator takes for a value which is sent immediately. Values that come faster are collected."""
_PATIENCE: Final = 0.001
"""Seconds after which collected values are sent although the message is not full."""
_MOMENT: Final = 0.1
"""Seconds after which a generator that is closed is interrupted where it runs."""
_DONE: Final = messages.Yielded().encode()


class Exchanges:
    """The exchanges of one worker. Any of its threads may wait for one; one thread at a time reads for all."""

    def __init__(self, worker: Any) -> None:
        """`worker` receives and sends: the `Worker` of host/agent/worker.py."""
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
        self._is_missed = False
        """SIGINT has arrived while nothing could be interrupted."""
        self._is_looking = False
        """The handler of SIGINT reads what has arrived."""
        self.conversations: dict[int, Conversation] = {}
        """The calls that exchange something, by stream."""
        self._local = threading.local()
        self._numbers = itertools.count(1)

    def enter(self, stream: int) -> Conversation | None:
        """This thread begins a call, and unpickles its arguments."""
        self._local.conversation = conversation = self.conversations.get(stream)
        return conversation

    def argument(self, number: int) -> Argument:
        conversation: Conversation | None = self._local.conversation
        if conversation is None:
            raise RuntimeError("this call has no streams")
        return conversation.argument(number)

    def ask(self, request: tuple[Any, ...]) -> Any:
        """Asks the client, in an exchange that belongs to no call; the reply is the only value of an argument."""
        conversation = self._of_process()
        number = next(self._numbers)
        payload = codec.dumps(number, then=[request])  # apart: the client may be unable to unpickle the request
        self.inside.append(number)
        try:
            conversation.request(payload)
            return next(conversation.argument(number))
        finally:
            self.inside.remove(number)
            conversation.forget(number)

    def _of_process(self) -> Conversation:
        """The one that belongs to no call."""
        return self.conversations.setdefault(0, Conversation(self, 0, 0))

    def open(self, stream: int, ask: int) -> None:
        """A call has arrived that exchanges something. Each request is for this many values, at most."""
        self.conversations[stream] = Conversation(self, stream, ask)

    def end(self, stream: int) -> None:
        """A call has ended: replies to its exchanges that have no reply."""
        with self._lock:
            conversation = self.conversations.pop(stream, None)
            asked = [] if conversation is None else list(conversation.unanswered())
        for one in asked:
            self.done(one)

    def done(self, stream: int) -> None:
        self._worker.send(stream, _DONE)

    def send(self, stream: int, message: bytes) -> None:
        """Sends a message while a function runs, which is not interrupted meanwhile."""
        self.inside.append(stream)
        try:
            self._worker.send(stream, message)
        finally:
            self.inside.remove(stream)
        self.check()

    def yielded(self, stream: int, values: list[codec.Payload]) -> None:
        """Replies with values."""
        group = as_group(values)
        self._worker.flush()
        self._worker.send(stream, messages.Yielded.head(parts=group.parts, plain=self._worker.plain), group)

    def take(self, stream: int, message: messages.Exchange, buffers: list[memoryview]) -> None:
        """An exchange has arrived."""
        with self._lock:
            conversation = self.conversations.get(message.call) if message.call else self._of_process()
            if conversation is not None:
                conversation.take(stream, message, buffers)
        if conversation is None:
            self.done(stream)

    def read_until(self, ready: Callable[[], object]) -> bool:
        """Reads until `ready()`, or waits while another thread reads. False: nothing more can be received."""
        self._worker.check_process()
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
        self._is_missed = True
        is_busy = self._is_looking or self._reader is not None or self.inside
        if is_busy or not any(one.runs_here for one in self.conversations.values()):
            return  # what was interrupted may hold a lock; `check` follows
        self._is_looking = True
        try:
            while self._is_missed:
                self._is_missed = False
                while self._ready.poll(0) and self._worker.read():
                    pass
        finally:
            self._is_looking = False
        for conversation in list(self.conversations.values()):
            conversation.interrupt()

    def check(self) -> None:
        """The generator continues: ends it if a SIGINT has arrived meanwhile."""
        if self._is_missed:
            self.interrupted()


class Conversation:
    """The exchanges of one call."""

    def __init__(self, exchanges: Exchanges, stream: int, ask: int) -> None:
        self._exchanges = exchanges
        self._stream = stream
        self.is_closed = self._is_waited_for = False
        self._closers: list[int] = []
        self._asked: deque[int] = deque()
        """Streams of the requests for values."""
        self._arguments: dict[int, Argument] = {}
        self._batch = Batch(max(1, ask), self._send)
        self._has_sent = False
        self._lock = threading.Lock()
        """Protects what is collected: two threads send it."""
        self._collected: threading.Event | None = None
        """Set while something is collected."""
        self.unpicklable = ""
        """The type of a value that could not be pickled, when `generate` has raised the error."""
        self._runs_on: int | None = None
        """The thread on which the generator runs at this moment."""

    def take(self, stream: int, message: messages.Exchange, buffers: list[memoryview]) -> None:
        """An exchange has arrived. Runs on the thread that reads."""
        if message.what == "next":
            self._asked.append(stream)
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
        yield from self._asked
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
        """Ends a generator that runs on this thread, if it was closed.

        First it has a moment to come to its next value, or to its own end: it may be in a ``finally`` block.
        """
        if not (self.is_closed and self.runs_here):
            return
        if self._is_waited_for:
            self._runs_on = None  # once
            raise GeneratorExit
        self._is_waited_for = True
        start_new_thread(_interrupt_later, (threading.get_ident(),))  # a handler cannot use locks of `threading`

    def request(self, payload: codec.Payload) -> None:
        """Sends one value as soon as the client asks for it."""
        while True:
            self.wait(lambda: self._asked)
            with self._lock:
                if self._asked:
                    self._exchanges.yielded(self._asked.popleft(), [payload])
                    return

    def forget(self, number: int) -> None:
        """An argument is no longer needed."""
        self._arguments.pop(number, None)

    def wait(self, ready: Callable[[], object]) -> None:
        """Waits for something that the client sends. Raises GeneratorExit if it closes the generator instead."""
        runs_on, self._runs_on = self._runs_on, None
        if not self._exchanges.read_until(lambda: ready() or self.is_closed):
            raise EOFError("the agent of this host has ended")
        self._runs_on = runs_on
        self._exchanges.check()
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
                self._batch.flush()
            close = getattr(values, "close", None)
            if close is not None:
                close()

    def _step(self, values: Iterator[Any]) -> None:
        began = time.monotonic()
        self._runs_on = threading.get_ident()
        try:
            self._exchanges.check()
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
        self._exchanges.send(stream, _DONE)

    def _put(self, value: codec.Payload, *, quick: bool) -> None:
        """Sends a value, or collects those that come quickly."""
        while not self.is_closed:
            with self._lock:
                self._batch.make_room(value)
                if self._asked:
                    self._batch.add(value, now=not quick)
                    if self._batch.values:
                        self._send_soon()
                    return
            self._exchanges.read_until(lambda: self._asked or self.is_closed)

    def _send_soon(self) -> None:
        """Has another thread send what is collected, if it is not sent soon."""
        if self._collected is None:
            self._collected = threading.Event()
            threading.Thread(target=self._send_later, args=(self._collected,), daemon=True).start()
        if not self._collected.is_set():
            self._collected.set()

    def _send_later(self, collected: threading.Event) -> None:
        while self._stream in self._exchanges.conversations:
            if collected.wait(timeout=1.0):
                collected.clear()
                time.sleep(_PATIENCE)
                with self._lock:
                    self._batch.flush()

    def _send(self, values: list[codec.Payload]) -> None:
        """Sends values, with the lock held. They were collected for the first request."""
        self._exchanges.yielded(self._asked.popleft(), values)
        self._has_sent = True


def _interrupt_later(thread: int) -> None:
    time.sleep(_MOMENT)
    signal.pthread_kill(thread, signal.SIGINT)


class Argument:
    """An argument that is a stream: an iterator over the values that the client sends."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._given: deque[tuple[int, deque[list[memoryview]]]] = deque()
        """What has arrived: the stream of each exchange, and its values."""
        self._end: tuple[int, list[memoryview]] | None = None

    def take(self, stream: int, message: messages.Exchange, buffers: list[memoryview]) -> None:
        if message.what == "end":
            self._end = (stream, buffers)
        else:
            self._given.append((stream, deque(of_group(buffers))))

    def unanswered(self) -> Iterator[int]:
        yield from (stream for stream, _ in self._given)
        if self._end is not None:
            yield self._end[0]

    def __iter__(self) -> Argument:
        return self

    def __next__(self) -> Any:
        if not self._given and self._end is None:
            self._conversation.wait(lambda: self._given or self._end is not None)
        if self._given:
            stream, values = self._given[0]
            data, *buffers = values.popleft()
            if not values:
                self._given.popleft()
                self._conversation.was_read(stream)
            return codec.loads(data, buffers)
        assert self._end is not None
        if self._end[1]:
            data, *buffers = self._end[1]
            error, text = codec.loads(data, buffers)
            raise error from RemoteTraceback(text, "the client")
        raise StopIteration
