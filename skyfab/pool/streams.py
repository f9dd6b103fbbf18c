"""Streams: the values of a generator that runs on a host. pool/feeds.py has the arguments that are streams.

A `Conversation` is this program's side of the exchanges with one running call (host/agent/exchanges.py has the other
side). Two requests for values are in progress while the values of a third are used, so each is for a third of what may
be read ahead.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

from skyfab._util.signals import NAP, SIGNAL_GUARD, finalizer
from skyfab.calls.pack import PackedCall
from skyfab.calls.results import unpack_result
from skyfab.calls.stream import Values
from skyfab.errors import CallCancelled, ProtocolError, SkyfabError, UsageError
from skyfab.pool.futures import CallFuture, refuse_to_block
from skyfab.pool.node import Node
from skyfab.protocol import messages
from skyfab.session.replies import Reply

if TYPE_CHECKING:
    import asyncio

T_co = TypeVar("T_co", covariant=True)

_CLOSING: Final = 5.0
"""Seconds that a generator has to end after it was closed. Then its process is ended."""
_LAST: Final = 2.0
"""Seconds that generators have to end when their pool closes."""


class Fed(Protocol):
    """An argument that is a stream."""

    def begin(self) -> None:
        """The call was sent."""

    def stop(self) -> None:
        """The call has ended."""


class Conversation:
    """The exchanges with one call. Thread-safe."""

    def __init__(self, call: PackedCall, *, untrusted: bool) -> None:
        self._call = call
        self._first = Reply(self._notify)
        """The request for values that is part of the call."""
        self._untrusted = untrusted
        self.future = CallFuture()
        """Resolved when the call has ended."""
        self.future.label = call.label
        self._begun: Callable[[], CallFuture | None] = lambda: None
        """A weak reference to the future of the iterator: an iterator without references is closed."""
        self.stop: Callable[[], object] = lambda: None
        """Stops the call, and ends its process."""
        self.feeds: list[Fed] = []
        """Its arguments that are streams."""
        self._node: Node | None = None
        self._worker = ""
        self._stream = 0
        self._lock = threading.RLock()
        self._asked: deque[Reply] = deque()
        """Requests for values, the oldest first."""
        self._values: deque[tuple[bool, list[memoryview]]] = deque()
        """Values that have arrived: whether each is plain data, and its buffers."""
        self._has_more = True
        """Whether the generator may have further values."""
        self._process = os.getpid()
        self._is_closed = self.is_cut_off = False
        """Whether its iterator was closed, or the pool."""
        self._ready: list[Callable[[], object]] = []
        """To be called when there is a value or an end."""

    @property
    def is_parents(self) -> bool:
        """Whether this is a forked child: the connection belongs to its parent."""
        return self._process != os.getpid()

    @property
    def host(self) -> str:
        return "" if self._node is None else self._node.name

    # ---- callbacks of the call

    def begin(self, node: Node, worker: str, stream: int) -> None:
        """The call was sent; possibly again, to another worker, because it had not begun."""
        with SIGNAL_GUARD, self._lock:
            self._node, self._worker, self._stream = node, worker, stream
            self._asked.clear()
            self._has_more = True
            if self._call.batch:
                self._asked.append(self._first)
            for feed in self.feeds:
                feed.begin()
            if self._is_closed:
                self._send_close()
        if (begun := self._begun()) is not None and not begun.done():
            begun.settle(RemoteIterator(self))
        self._notify()

    def end(self, error: BaseException | None) -> None:
        """The call has ended."""
        self.future.settle(None, error)
        if not self._first.is_there:
            self.yielded(messages.Yielded(), [])
        if (begun := self._begun()) is not None and not begun.done():
            begun.settle(None, error)
        for feed in self.feeds:
            feed.stop()
        self._notify()

    def yielded(self, message: messages.Message, buffers: list[memoryview]) -> None:
        """The first values have arrived."""
        if not self._first.is_there:
            self._first.answered(message, buffers)

    def when_begun(self) -> CallFuture:
        """The future of the iterator over its values, which is resolved when the call begins."""
        future = CallFuture()
        future.label = self._call.label
        future.on_cancel = lambda: self.close(wait=False)
        self._begun = weakref.ref(future)
        if self._node is not None:
            future.settle(RemoteIterator(self))
        elif self.future.done():
            future.settle(None, self.future.exception())
        return future

    def exchange(self, what: str, caller: Reply, parts: Sequence[Any] = (), **about: int) -> None:
        """Sends an exchange. If the host is lost, `caller` fails immediately."""
        assert self._node is not None
        sizes = tuple(map(len, parts))
        message = messages.Exchange(worker=self._worker, call=self._stream, what=what, parts=sizes, **about)
        try:
            caller.sent(
                self._node.session.send(
                    message, parts, answer=caller.answered, failure=caller.failed, worker=self._worker
                )
            )
        except SkyfabError as error:
            caller.failed(error)

    # ---- waiting

    @property
    def is_ready(self) -> bool:
        """Whether there is a value, or an end."""
        if self._values:
            return True
        return self._asked[0].is_there if self._asked else self.future.done()

    def when_ready(self, call: Callable[[], object]) -> None:
        """Calls `call` once `is_ready`."""
        with SIGNAL_GUARD, self._lock:
            ready = self.is_ready
            if not ready:
                self._ready.append(call)
        if ready:
            call()

    def _notify(self) -> None:
        with SIGNAL_GUARD, self._lock:
            if not self._ready or not self.is_ready:
                return
            ready, self._ready = self._ready, []
        for call in ready:
            call()

    def _wait(self) -> None:
        reply = Reply()
        self.when_ready(lambda: reply.failed(CallCancelled("")))
        if self._node is not None:
            self._node.session.read_until_there(reply)
        reply.block()

    # ---- values of its generator

    def next_value(self) -> Any:
        """The next value. Raises StopIteration, or what the generator has raised."""
        if self.is_parents:
            raise UsageError("this iterator belongs to another process, and only that process can read it")
        with SIGNAL_GUARD:
            if self.is_cut_off:
                raise self._cut_off()
            if self._is_closed:
                raise StopIteration
            while not self._values:
                with self._lock:
                    if not self._asked and self._has_more and self._node is not None and not self.future.done():
                        self._ask()
                if not self.is_ready:
                    refuse_to_block()
                    self._wait()
                with self._lock:
                    if not self._values and self._asked and self._asked[0].is_there:
                        self._take(self._asked.popleft())
                    elif not self._values and not self._asked and self.future.done():
                        self.future.result()
                        if self.is_cut_off:
                            raise self._cut_off()
                        raise StopIteration
            plain, buffers = self._values.popleft()
        message = messages.Result(parts=(), plain=plain)
        label, untrusted = self._call.label, self._untrusted
        return unpack_result(message, buffers, host=self.host, rank=None, label=label, untrusted=untrusted)

    def _cut_off(self) -> CallCancelled:
        hint = "read it inside the with block"
        return CallCancelled(f"{self._call.label} was ended when the pool was closed", host=self.host, hint=hint)

    def _ask(self) -> None:
        asked = Reply(self._notify)
        self._asked.append(asked)
        self.exchange("next", asked, count=max(1, self._call.batch))

    def _take(self, asked: Reply) -> None:
        """Takes the values of a reply, and asks for more."""
        message: messages.Message | None = None
        with suppress(SkyfabError):  # the host is lost: that is how the call ends
            message, buffers = asked.wait()
        if not isinstance(message, messages.Yielded) or not message.count:
            self._has_more = asked is self._first and not self.future.done()  # then its first value is large
            return
        values = [buffers] if message.count == 1 else [[buffer] for buffer in buffers]
        if len(values) != message.count or message.count > max(1, self._call.batch):
            raise ProtocolError("invalid reply with values of a generator", host=self.host)
        self._values.extend((message.plain, value) for value in values)
        most = 1 if asked is self._first else 2  # so that the first value is used sooner
        while self._has_more and len(self._asked) < min(most, self._call.ahead) and not self._is_closed:
            self._ask()

    # ---- closing

    def close(self, *, wait: bool = True) -> None:
        """Ends the generator. With `wait`, raises what it raises while it ends."""
        if self.is_parents:
            return
        with SIGNAL_GUARD:
            with self._lock:
                first, self._is_closed = not self._is_closed, True
                if self.future.done():
                    return
                begun = self._node is not None
                if begun and first:
                    self._send_close()
            if not begun:
                self.stop()
            elif wait:
                self._await_end()
            elif first:
                timer = threading.Timer(_CLOSING, lambda: self.future.done() or self.stop())
                timer.daemon = True
                concurrent.futures.Future.add_done_callback(self.future, lambda _: timer.cancel())
                timer.start()

    def _send_close(self) -> None:
        self.exchange("close", Reply())

    def _await_end(self) -> None:
        try:
            error = self.future.exception(_CLOSING)
        except concurrent.futures.TimeoutError:
            self.stop()
            return
        if error is not None and not isinstance(error, SkyfabError):  # else it has ended in another way
            raise error


def end_all(conversations: Sequence[Conversation]) -> None:
    """The pool closes: ends generators, and waits for them for a short time."""
    for conversation in conversations:
        conversation.is_cut_off = True
        conversation.close(wait=False)
    concurrent.futures.wait([conversation.future for conversation in conversations], timeout=_LAST)


class RemoteIterator(Values[T_co]):
    """The iterator over the values of one call."""

    def __init__(self, conversation: Conversation, owner: object = None) -> None:
        """`owner` must not be dropped before the iterator is."""
        self.conversation = conversation
        self._owner = owner

    def __next__(self) -> T_co:
        try:
            return self.conversation.next_value()  # type: ignore[no-any-return]
        except BaseException as error:
            if not isinstance(error, Exception) or not self.conversation.future.done():
                self.conversation.close(wait=False)  # interrupted
            if isinstance(error, KeyboardInterrupt) and self.conversation.host:
                vars(error)["stopped"] = f"stopped on {self.conversation.host}"
            raise

    async def __anext__(self) -> T_co:
        import asyncio

        loop = asyncio.get_running_loop()
        while not self.conversation.is_ready:
            ready = loop.create_future()

            self.conversation.when_ready(functools.partial(_wake, loop, ready))
            await ready
        try:
            return self.__next__()
        except StopIteration:
            raise StopAsyncIteration from None
        except StopAsyncIteration as error:  # of the generator's own: it would look like the end
            raise RuntimeError("the generator raised StopAsyncIteration") from error

    def close(self) -> None:
        self.conversation.close()

    async def aclose(self) -> None:
        import asyncio

        await asyncio.to_thread(self.close)

    @finalizer
    def __del__(self) -> None:
        """Closes it on a new thread: the garbage collector may run on any thread, with any lock held."""
        conversation = getattr(self, "conversation", None)
        if conversation is None or conversation.is_parents or sys.is_finalizing():
            return
        if not conversation.future.done():
            threading.Thread(target=conversation.close, kwargs={"wait": False}, daemon=True).start()

    def __repr__(self) -> str:
        conversation = self.conversation
        state = "ended" if conversation.future.done() else f"on {conversation.host}" if conversation.host else "waiting"
        return f"<values of {conversation.future.label}: {state}>"


def _wake(loop: asyncio.AbstractEventLoop, ready: asyncio.Future[None]) -> None:
    def resolve() -> None:
        if not ready.done():
            ready.set_result(None)

    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(resolve)


def merge(*iterators: Values[Any]) -> Iterator[tuple[int, Any]]:
    """Yields ``(rank, value)`` for the values of several generators as they come: ``sky.merge(*(f() @ compute))``.

    `rank` is the position among `iterators`, which ``@`` returns in rank order.
    """
    for one in iterators:
        if not isinstance(one, RemoteIterator):
            raise TypeError(f"merge() takes iterators of generators that run on hosts, not {one!r:.80}")
    return _merged(cast("Sequence[RemoteIterator[Any]]", iterators))


def _merged(iterators: Sequence[RemoteIterator[Any]]) -> Iterator[tuple[int, Any]]:
    ready: SimpleQueue[int] = SimpleQueue()
    for rank, one in enumerate(iterators):
        one.conversation.when_ready(functools.partial(ready.put, rank))
    left = len(iterators)
    while left:
        try:
            rank = ready.get(timeout=NAP)
        except Empty:
            continue
        try:
            value = next(iterators[rank])
        except StopIteration:
            left -= 1
            continue
        iterators[rank].conversation.when_ready(functools.partial(ready.put, rank))
        yield rank, value
