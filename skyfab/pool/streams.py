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
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar, cast

from skyfab._util.signals import NAP, SIGNAL_GUARD, called, without_signals
from skyfab.calls.pack import PackedCall
from skyfab.calls.results import unpack_value
from skyfab.calls.stream import Values
from skyfab.errors import CallCancelled, ProtocolError, SkyfabError, UsageError
from skyfab.pool.futures import CallFuture, refuse_to_block
from skyfab.pool.node import Node
from skyfab.protocol import codec, messages
from skyfab.protocol.batches import of_group
from skyfab.protocol.frames import Buffer
from skyfab.session.replies import Reply
from skyfab.session.session import Session

T_co = TypeVar("T_co", covariant=True)

_CLOSING: Final = 5.0
"""Seconds that a generator has to end after it was closed. Then its process is ended."""
_LAST: Final = 2.0
"""Seconds that generators have to end when their pool closes."""
_READY: Final = messages.Yielded()


class Conversation:
    """The exchanges with one call. Thread-safe."""

    def __init__(self, call: PackedCall, future: CallFuture, *, untrusted: bool) -> None:
        """`future` is resolved when the call has ended."""
        self._call = call
        self._untrusted = untrusted
        self.future = future
        future.label = call.label
        self.stop: Callable[[], object] = lambda: None
        """Stops the call, and ends its process."""
        self.on_begin: list[Callable[[], None]] = []
        """To be called when the call was sent."""
        self._node: Node | None = None
        self._worker = ""
        self._stream = 0
        self._lock = threading.RLock()
        self._reading = threading.RLock()
        """Held while a value is waited for: several threads may read."""
        self._most = min(2, call.ahead) if call.yields else 0
        """Requests that are in progress before a value is needed."""
        self._asked: deque[Reply] = deque()
        """Requests for values, the oldest first."""
        self._has_more = True
        """Whether the generator may have further values."""
        self._values: deque[tuple[bool, list[memoryview]]] = deque()
        """Values that have arrived: whether each is plain data, and its buffers."""
        self._process = os.getpid()
        self._is_closed = self.is_cut_off = False
        """Whether its iterator was closed, or the pool."""
        self._ready: list[Callable[[], object]] = []
        """To be called when there is a value or an end."""
        self.taken = 0
        """How many values the program has taken."""

    @property
    def is_parents(self) -> bool:
        """Whether this is a forked child: the connection belongs to its parent."""
        return self._process != os.getpid()

    @property
    def has_ended(self) -> bool:
        """Whether the call has ended."""
        return self.future.done()

    @property
    def host(self) -> str:
        return "" if self._node is None else self._node.name

    # ---- callbacks of the call

    def begin(self, node: Node, worker: str, stream: int) -> None:
        """The call was sent; possibly again, to another worker, because it had not begun."""
        with SIGNAL_GUARD, self._lock:
            self._node, self._worker, self._stream = node, worker, stream
            self._asked.clear()
            self._has_more = True  # an earlier worker may have said that there is none
            for call in self.on_begin:
                call()
            if self._is_closed:
                self._send_close()
            self._ask_ahead()
            if self._ready:
                self._ask_now()

    def end(self, result: Any, error: BaseException | None) -> None:
        """The call has ended."""
        self.future.settle(result, error)
        self._notify()
        with SIGNAL_GUARD, self._lock:
            if self._is_closed:
                self._forget_requests()

    def _error(self) -> BaseException | None:
        return CallCancelled("the call was cancelled") if self.future.cancelled() else self.future.exception()

    def exchange(self, what: str, caller: Reply, given: codec.Payload | None = None, number: int = 0) -> None:
        assert self._node is not None
        exchange(self._node.session, self._worker, self._stream, what, caller, given, number)

    # ---- waiting

    @property
    def is_ready(self) -> bool:
        """Whether there is a value, or an end."""
        asked = self._asked
        return bool(self._values) or (asked[0].is_there if asked else self.has_ended)

    @property
    def is_awaited(self) -> bool:
        """Whether the program waits for a value, or the end."""
        return bool(self._ready)

    def when_ready(self, call: Callable[[], object]) -> None:
        """Calls `call` once `is_ready`."""
        with SIGNAL_GUARD, self._lock:
            self._ask_now()
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
        self.when_ready(lambda: reply.answered(_READY, []))
        if self._node is not None:
            self._node.session.read_until_there(reply)
        reply.block()

    # ---- values of its generator

    def next_value(self) -> Any:
        """The next value. Raises StopIteration, or what the generator has raised."""
        if self.is_parents:
            raise UsageError("this iterator belongs to another process, and only that process can read it")
        SIGNAL_GUARD.wrap()
        with SIGNAL_GUARD:
            SIGNAL_GUARD.acquire(self._reading)
            try:
                if self.is_cut_off:
                    raise self._cut_off()
                if self._is_closed:
                    raise StopIteration
                while not self._values:
                    self._receive()
                plain, buffers = self._values.popleft()
                self.taken += 1
                self._ask_ahead()
            finally:
                self._reading.release()
        label, untrusted = self._call.label, self._untrusted
        return unpack_value(buffers, plain=plain, host=self.host, rank=None, label=label, untrusted=untrusted)

    def _receive(self) -> None:
        """Waits for values. Raises StopIteration, or what the generator has raised."""
        if not self.is_ready:
            refuse_to_block()
            self._wait()
        with self._lock:
            if self._values:
                return
            if self._asked:
                try:
                    found = self._asked.popleft().found
                except SkyfabError:  # the host is lost: that is how the call ends
                    self._has_more = False
                else:
                    self._has_more = self._take(*found)
            elif self.has_ended:
                self._forget_requests()
                if (error := self._error()) is not None:
                    raise error
                raise self._cut_off() if self.is_cut_off else StopIteration

    def _take(self, message: messages.Message, buffers: list[memoryview]) -> bool:
        """Takes the values of a reply. Returns whether there are any."""
        if not isinstance(message, messages.Yielded) or not buffers:
            return False
        values = of_group(buffers)
        if len(values) > max(1, self._call.batch):
            raise ProtocolError("more values than it was asked for", host=self.host)
        self._values.extend((message.plain, value) for value in values)
        return bool(values)

    def _ask_ahead(self) -> None:
        """Asks for more values before they are needed."""
        if len(self._asked) < self._most:
            with self._lock:
                while self._has_more and len(self._asked) < self._most and not (self._is_closed or self.has_ended):
                    self._ask()

    def _ask_now(self) -> None:
        """Asks for values if none are there and none have been asked for."""
        if self._has_more and not (self._values or self._asked or self._node is None or self.has_ended):
            self._ask()

    def _ask(self) -> None:
        asked = Reply(self._notify)
        self._asked.append(asked)
        self.exchange("next", asked)

    def _forget_requests(self) -> None:
        """The call has ended. Else they and this conversation would refer to each other."""
        self._asked = deque()  # another thread may be looking at the old one

    def _cut_off(self) -> CallCancelled:
        hint = "read it inside the with block"
        return CallCancelled(f"{self._call.label} was ended when the pool was closed", host=self.host, hint=hint)

    # ---- closing

    def close(self, *, wait: bool = True) -> None:
        """Ends the generator. With `wait`, raises what it raises while it ends."""
        if self.is_parents:
            return
        with SIGNAL_GUARD:
            with self._lock:
                first, self._is_closed = not self._is_closed, True
                if self.has_ended:
                    return
                begun = self._node is not None
                if begun and first:
                    self._send_close()
            if not begun:
                self._stop()
            elif wait:
                self.await_end()
            elif first:
                timer = threading.Timer(_CLOSING, self._stop)
                timer.daemon = True
                concurrent.futures.Future.add_done_callback(self.future, lambda _: timer.cancel())
                timer.start()

    def _stop(self) -> None:
        if not self.has_ended:
            self.stop()
            self._notify()  # it may have ended now

    def _send_close(self) -> None:
        self.exchange("close", Reply())

    def await_end(self) -> None:
        """Waits for the end of a generator that was closed. Raises what it raises."""
        try:
            error = self.future.exception(_CLOSING)
        except concurrent.futures.TimeoutError:
            self._stop()
            return
        except concurrent.futures.CancelledError:
            return
        if error is not None and not isinstance(error, SkyfabError):  # else it has ended in another way
            raise error


def exchange(
    session: Session,
    worker: str,
    call: int,
    what: str,
    caller: Reply,
    given: codec.Payload | None = None,
    number: int = 0,
) -> None:
    """Sends an exchange to a call, or to its process (0). If the host is lost, `caller` fails immediately."""
    parts: Sequence[Buffer] = () if given is None else (given.data, *given.buffers)
    message = messages.Exchange(worker=worker, call=call, what=what, parts=tuple(map(len, parts)), number=number)
    try:
        caller.sent(session.send(message, parts, answer=caller.answered, failure=caller.failed, worker=worker))
    except SkyfabError as error:
        caller.failed(error)


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
            if not isinstance(error, Exception) or not self.conversation.has_ended:
                _stop(error, [self])
            raise

    async def __anext__(self) -> T_co:
        while not self.conversation.is_ready:
            try:
                await called(self.conversation.when_ready)
            except BaseException as error:  # cancelled, also by Ctrl-C
                _stop(error, [self])
                raise
        try:
            return self.__next__()
        except StopIteration:
            raise StopAsyncIteration from None
        except StopAsyncIteration as error:  # of the generator's own: it would look like the end
            raise RuntimeError("the generator raised StopAsyncIteration") from error

    def close(self) -> None:
        self.conversation.close()

    @without_signals
    def __del__(self) -> None:
        """Closes it on a new thread: the garbage collector may run on any thread, with any lock held."""
        conversation = getattr(self, "conversation", None)
        if conversation is None or conversation.is_parents or sys.is_finalizing():
            return
        if not conversation.has_ended:
            threading.Thread(target=conversation.close, kwargs={"wait": False}, daemon=True).start()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(f"{self!r} belongs to this program; sky.stream(…) passes its values on")

    def __repr__(self) -> str:
        conversation = self.conversation
        state = "ended" if conversation.has_ended else f"on {conversation.host}" if conversation.host else "waiting"
        return f"<values of {conversation.future.label}: {state}>"


def _stop(error: BaseException, iterators: Sequence[RemoteIterator[Any]]) -> None:
    """Ends generators that were interrupted. The message of Ctrl-C says on which hosts."""
    for one in iterators:
        one.conversation.close(wait=False)
    hosts = [*filter(None, dict.fromkeys(one.conversation.host for one in iterators))]
    for raised in filter(None, (error, error.__context__)):  # asyncio cancels tasks while it handles Ctrl-C
        vars(raised)["stopped"] = f"stopped on {', '.join(hosts)}" if hosts else ""


def merge(*iterators: Values[Any]) -> _Merged:
    """Yields ``(rank, value)`` for the values of several generators as they come: ``sky.merge(*(f() @ compute))``.

    `rank` is the position among `iterators`, which ``@`` returns in rank order. Several threads may read. `close` and
    `aclose` end all generators.
    """
    for one in iterators:
        if not isinstance(one, RemoteIterator):
            hint = "; put * before a list" if isinstance(one, (list, tuple)) else ""
            raise TypeError(f"merge() takes iterators of generators that run on hosts, not {one!r:.80}{hint}")
    return _Merged(cast("Sequence[RemoteIterator[Any]]", iterators))


class _Merged(Values[tuple[int, Any]]):
    """The values of several generators. Not a generator itself, which only one thread at a time can read."""

    def __init__(self, iterators: Sequence[RemoteIterator[Any]]) -> None:
        self._iterators = iterators
        self._left = set(range(len(iterators)))
        """Ranks that have not ended."""
        self._used = deque(self._left)
        """Ranks whose next value nobody waits for: it is not asked for before it is wanted."""
        self._ready: SimpleQueue[int] = SimpleQueue()

    def __next__(self) -> tuple[int, Any]:
        while self._left:
            try:
                with suppress(IndexError):
                    while True:
                        rank = self._used.popleft()
                        self._iterators[rank].conversation.when_ready(functools.partial(self._ready.put, rank))
                rank = self._ready.get(timeout=NAP)
            except Empty:
                continue
            except BaseException as error:
                _stop(error, self._iterators)
                raise
            try:
                value = next(self._iterators[rank])
            except StopIteration:
                self._left.discard(rank)
                continue
            except BaseException:
                self._left.clear()
                raise
            self._used.append(rank)
            return rank, value
        raise StopIteration

    async def __anext__(self) -> tuple[int, Any]:
        import asyncio

        try:
            found = await asyncio.to_thread(next, self, None)
        except asyncio.CancelledError as error:
            _stop(error, self._iterators)
            raise
        if found is None:
            raise StopAsyncIteration
        return found

    def close(self) -> None:
        """Ends all generators, and waits until they have ended. Raises what they raise meanwhile."""
        self._left.clear()
        found = [one.conversation for one in self._iterators]
        ending = [one for one in found if not one.has_ended and not one.is_parents]
        for one in ending:  # all end at once
            one.close(wait=False)
        with SIGNAL_GUARD, ExitStack() as stack:
            for one in ending:
                stack.callback(one.await_end)
