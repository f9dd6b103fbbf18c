"""Arguments that are streams: a thread of this program reads them, and sends the values as the ranks use them."""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final

from skyfab._util.signals import SIGNAL_GUARD, GuardedCondition
from skyfab.calls.call import AHEAD
from skyfab.calls.pack import PackedCall
from skyfab.calls.stream import Stream
from skyfab.host.agent.outcomes import said
from skyfab.pool.futures import CallFuture
from skyfab.pool.streams import Conversation
from skyfab.protocol import codec
from skyfab.protocol.batches import Batch, as_group
from skyfab.session.replies import Reply

_SENT: Final = 2
"""Messages to a rank that have not been read."""
_LOOK: Final = 0.1
"""Seconds between two looks at whether the program leaves a rank's values unread."""
_LEFT: Final = 1.0
"""Seconds after which values are kept here for a rank whose own values the program does not read."""


class Producer:
    """Reads a stream of this program on its own thread, for the ranks of a call."""

    def __init__(self, stream: Stream[Any], feeds: Sequence[Feed]) -> None:
        self._stream = stream
        stream.is_taken = True
        self._feeds = feeds
        self._lock = threading.Lock()
        self._has_started = False
        for feed in feeds:
            feed.producer = self

    def advance(self) -> None:
        """Begins to read once every rank has begun, or ended."""
        with SIGNAL_GUARD, self._lock:
            if self._has_started or not all(feed.has_begun or feed.has_ended for feed in self._feeds):
                return
            self._has_started = True
        threading.Thread(target=self._produce, name="skyfab-stream", daemon=True).start()

    @property
    def is_awaited(self) -> bool:
        """Whether the program waits for a value of one of the ranks."""
        return any(feed.is_awaited for feed in self._feeds)

    def _produce(self) -> None:
        error: Exception | None = None
        values = self._stream.values
        try:
            for number, value in enumerate(values):
                payload = _copied(codec.dumps(value))
                del value
                feeds = [self._feeds[number % len(self._feeds)]] if self._stream.shard else self._feeds
                for feed in feeds:
                    feed.put(payload)
                if all(feed.has_ended for feed in self._feeds):
                    break
        except Exception as raised:
            error = raised
        except BaseException as raised:  # the function must not end as this thread does
            error = RuntimeError(f"its producer raised {type(raised).__name__}: {said(raised)}")
        for feed in self._feeds:
            feed.finish(error)
        close = getattr(values, "close", None)
        if close is not None:
            with suppress(Exception):
                close()


class Feed:
    """Sends the values of a stream to one rank. Short values are sent together while earlier ones are not read."""

    def __init__(self, conversation: Conversation, number: int) -> None:
        self._conversation = conversation
        self._number = number
        self.producer: Producer
        self.has_begun = self.has_ended = False
        self._changed = GuardedCondition()
        self._batch = Batch(AHEAD // 3, self._give)
        self._given: deque[tuple[str, codec.Payload | None]] = deque()
        """What has not been read, the oldest first; the first `_SENT` were sent. The reply says that one was read."""
        self._taken, self._since, self._is_left = -1, 0.0, False
        """For `_is_left_alone`: how many values the program had taken, since when, and what it found."""

    @property
    def is_awaited(self) -> bool:
        """Whether the program waits for a value of this rank."""
        return self._conversation.is_awaited

    def begin(self) -> None:
        """The call was sent: repeats what an earlier worker has received."""
        with self._changed:
            self.has_begun = True
            for given in [*self._given][:_SENT]:  # a reply may come meanwhile
                self._send(given)
        self.producer.advance()

    def stop(self, _: object) -> None:
        """The call has ended."""
        with self._changed:
            self.has_ended = True
            self._changed.notify_all()
        self.producer.advance()

    def put(self, value: codec.Payload) -> None:
        """Sends a value. Waits if two earlier messages have not been read."""
        with self._changed:
            self._batch.make_room(value)
            self._batch.add(value, now=not self._given)

    def finish(self, error: Exception | None) -> None:
        """The values have ended; `error` is the exception that ended them, if any."""
        given = None if error is None else _encoded(error).copied()
        with self._changed:
            self._batch.flush()
            self._send_new("end", given)

    def _give(self, values: list[codec.Payload]) -> None:
        while not self.has_ended and len(self._given) >= _SENT and not self._is_left_alone():
            self._changed.wait(_LOOK)
        self._send_new("give", as_group(values))

    def _is_left_alone(self) -> bool:
        """Whether the program leaves this rank's values unread while it waits for those of another rank.

        This rank then reads no further, and what the other rank needs would never be sent.
        """
        mine = self._conversation
        if mine.taken != self._taken or not mine.is_ready:
            self._taken, self._since, self._is_left = mine.taken, time.monotonic(), False
        elif time.monotonic() - self._since >= _LEFT:
            self._is_left = self._is_left or self.producer.is_awaited
        return self._is_left

    def _send_new(self, *given: Any) -> None:
        if not self.has_ended:
            self._given.append(given)
            if len(self._given) <= _SENT:
                self._send(given)

    def _send(self, given: tuple[str, codec.Payload | None]) -> None:
        what, values = given
        self._conversation.exchange(what, Reply(lambda: self._was_read(given)), values, self._number)

    def _was_read(self, given: tuple[str, codec.Payload | None]) -> None:
        """A reply: the call has read these values, or it has ended. Runs on the thread that reads."""
        with self._changed:
            if self._given and self._given[0] is given:
                self._given.popleft()
                if len(self._given) >= _SENT:
                    self._send(self._given[_SENT - 1])
            if not self._given:
                self._batch.flush()
            self._changed.notify_all()


def _encoded(error: Exception) -> codec.Payload:
    """The exception with its traceback; one that cannot be formatted or pickled is replaced."""
    text = ""
    try:
        trace = error.__traceback__ and error.__traceback__.tb_next  # without the frame of this module
        text = "".join(traceback.format_exception(type(error), error, trace))
        return codec.dumps((error, text))
    except Exception:
        return codec.dumps((RuntimeError(f"{type(error).__qualname__}: {said(error)}"), text))


def _copied(payload: codec.Payload) -> codec.Payload:
    """A copy: the program may change its arrays."""
    return codec.Payload(payload.data, [memoryview(bytes(buffer)) for buffer in payload.buffers])


def converse(call: PackedCall, futures: Sequence[CallFuture], *, untrusted: bool) -> list[Conversation]:
    """The conversations with the ranks of a call, which also send them its streams. `futures`: when each has ended."""
    made = [Conversation(call, future, untrusted=untrusted) for future in futures]
    for number, stream in enumerate(call.found):
        if not isinstance(stream, Stream):
            continue
        feeds = [Feed(conversation, number) for conversation in made]
        for conversation, feed in zip(made, feeds, strict=True):
            conversation.on_begin.append(feed.begin)
            Future.add_done_callback(conversation.future, feed.stop)
        Producer(stream, feeds)
    return made
