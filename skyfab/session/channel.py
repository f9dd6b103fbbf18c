"""A channel: one forwarded TCP connection on a stream of a session, which may be replaced meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

from skyfab.errors import ProtocolError
from skyfab.protocol.messages import Connect, Message, Shut
from skyfab.protocol.send_queue import FORWARD_QUEUE, FORWARD_WINDOW
from skyfab.session.connection import Connection


class Receiver(Protocol):
    """What a channel is for. Thread-safe."""

    def on_message(self, message: Message | None) -> None:
        """Done: it is connected; Failed: it will not be; Shut. None: the session has ended."""

    def on_data(self, view: memoryview) -> None:
        """The host has sent this."""

    def on_room(self) -> None:
        """`Channel.paused` has become false. Called with locks held: it must not wait."""


class Channel:
    """The client's end. Thread-safe. The receiver's methods are called in the order in which things arrived."""

    def __init__(self, connection: Connection, message: Connect, receiver: Receiver) -> None:
        """Has the host connect. Raises HostLost if the session has ended."""
        self._connection = connection
        self._receiver = receiver
        self._unused = 0
        self.paused = False
        self._mux = connection.replies.mux
        with connection.lock:
            if connection.ended is not None:
                raise connection.ended
            self._stream = connection.new_number()
            connection.replies.channels[self._stream] = self
            self._mux.limit(self._stream, FORWARD_WINDOW, self._taken)
            self._mux.send(self._stream, message.encode())
            connection.flush()

    def send(self, data: bytes) -> None:
        def queue() -> None:
            self._mux.send_data(self._stream, data)
            self._connection.flush()
            self.paused = self._mux.queued(self._stream) >= FORWARD_QUEUE

        self._if_open(queue)

    def used(self, count: int) -> None:
        def grant() -> None:
            self._unused -= count
            self._mux.used(self._stream, count)

        self._if_open(grant)

    def shut(self, total: int, broken: bool) -> None:
        self._if_open(lambda: self._mux.send(self._stream, Shut(total=total, broken=broken).encode()))

    def finish(self, drop: bool) -> None:
        """Both directions have ended: forgets the stream, at once or after what is queued."""

        def end() -> None:
            (self._mux.forget if drop else self._mux.finish)(self._stream)
            del self._connection.replies.channels[self._stream]

        self._if_open(end)

    def break_off(self) -> None:
        """Ends the connection on the host, whatever is under way."""

        def end() -> None:
            self._mux.forget(self._stream)
            self._mux.send(self._stream, Shut(total=0, broken=True).encode())
            del self._connection.replies.channels[self._stream]

        self._if_open(end)

    def _if_open(self, do: Callable[[], None]) -> None:
        with self._connection.lock:
            if self._connection.replies.channels.get(self._stream) is self:
                do()
                self._connection.flush()

    # ---- with the connection's lock held

    def opened(self, message: Message) -> None:
        self._later(functools.partial(self._receiver.on_message, message))

    def data(self, view: memoryview) -> None:
        self._unused += len(view)
        if self._unused > FORWARD_WINDOW:
            raise ProtocolError("more data than it was allowed to send")
        self._later(functools.partial(self._receiver.on_data, view))

    def end(self) -> None:
        self._later(functools.partial(self._receiver.on_message, None))

    def _later(self, action: Callable[[], None]) -> None:
        self._connection.replies.after.append(action)

    def _taken(self, left: int) -> None:
        if self.paused and left < FORWARD_QUEUE // 2:
            self.paused = False
            self._receiver.on_room()
