"""Values of a stream in messages: small ones share a message, each large one has its own. Both sides use it."""

from __future__ import annotations

from skyfab.errors import ProtocolError
from skyfab.protocol import codec
from skyfab.protocol.mux import SMALL

TYPE_CHECKING = False  # see frames.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

BYTES = 4 * 1024 * 1024 // 3
"""Most bytes in one message, unless one value has more. Two are in progress while the values of a third are used."""


class Batch:
    """Collects the values for one message. Its user holds a lock."""

    def __init__(self, most: int, send: Callable[[list[codec.Payload]], None]) -> None:
        """`send` is called with the values of each message, at most `most` of them."""
        self._most = most
        self._send = send
        self._size = 0
        self.values: list[codec.Payload] = []

    def make_room(self, value: codec.Payload, limit: int = BYTES) -> None:
        """Sends what was collected, unless `value` fits into the same message, of `limit` bytes."""
        if self.values and (is_large(value) or self._size + value.size > limit):
            self.flush()

    def add(self, value: codec.Payload, *, now: bool) -> None:
        """Adds a value; with `now`, or if nothing more fits, sends the message."""
        self.values.append(value)
        self._size += value.size
        if now or is_large(value) or len(self.values) >= self._most:
            self.flush()

    def flush(self) -> None:
        """Sends what was collected."""
        values, self.values, self._size = self.values, [], 0
        if values:
            self._send(values)


def is_large(value: codec.Payload) -> bool:
    return bool(value.buffers) or len(value.data) > SMALL


def joined(values: list[codec.Payload]) -> list[Any]:
    """The parts of a message with these values."""
    return [part for value in values for part in (value.data, *value.buffers)]


def separated(message: Any, buffers: list[memoryview]) -> list[list[memoryview]]:
    """The values in a message, each as its buffers. Raises ProtocolError."""
    values = [buffers] if message.count == 1 and buffers else [[buffer] for buffer in buffers]
    if len(values) != message.count:
        raise ProtocolError("invalid message with values")
    return values
