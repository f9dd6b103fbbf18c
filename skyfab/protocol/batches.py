"""Groups: several values in one message, each pickled by itself. Both sides use them.

Small values of a stream share a message, each large one has its own. A `map` sends items in groups.
"""

from __future__ import annotations

import itertools
import struct

from skyfab.errors import ProtocolError
from skyfab.protocol import codec
from skyfab.protocol.mux import SMALL

TYPE_CHECKING = False  # see frames.py
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BYTES = 4 * 1024 * 1024 // 3
"""Most bytes in one message, unless one value has more. Two are in progress while the values of a third are used."""

GROUP_BYTES = 1024 * 1024
GROUP_PARTS = 256
"""Bytes and buffers beside the pickles of a group of items, or of their results. One item has what it needs."""


class Batch:
    """Collects the values for one message. Its user holds a lock."""

    def __init__(self, most: int, send: Callable[[list[codec.Payload]], None]) -> None:
        """`send` is called with the values of each message, at most `most` of them."""
        self._most = most
        self._send = send
        self._size = 0
        self.values: list[codec.Payload] = []

    def make_room(self, value: codec.Payload) -> None:
        """Sends what was collected, unless `value` fits into the same message."""
        if self.values and (is_large(value) or self._size + value.size > BYTES):
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


def as_group(values: Sequence[codec.Payload]) -> codec.Payload:
    """Several values as one payload: a table with the size and the number of buffers of each, and then what they have.

    >>> [codec.loads(*value) for value in of_group([memoryview(as_group([codec.dumps(1), codec.dumps("b")]).data)])]
    [1, 'b']
    """
    table = [number for value in values for number in (len(value.data), len(value.buffers))]
    head = struct.pack(f"<{1 + len(table)}Q", len(values), *table)
    refs = {key: name for value in values for key, name in value.refs.items()}
    kinds = {key: kind for value in values for key, kind in value.kinds.items()}
    buffers = [buffer for value in values for buffer in value.buffers]
    return codec.Payload(b"".join((head, *(value.data for value in values))), buffers, refs, kinds)


def of_group(buffers: Sequence[memoryview]) -> list[list[memoryview]]:
    """The values of a group, each as its buffers. Raises ProtocolError."""
    data, *rest = buffers
    try:
        (count,) = struct.unpack_from("<Q", data)
        table = struct.unpack_from(f"<{2 * count}Q", data, 8)
    except struct.error:
        raise ProtocolError("a group of values without a table") from None
    sizes, counts = table[::2], table[1::2]
    ends = [*itertools.accumulate(sizes, initial=8 + 16 * count)]
    lasts = [*itertools.accumulate(counts, initial=0)]
    if ends[-1] != len(data) or lasts[-1] != len(rest):
        raise ProtocolError("a group of values that does not fit its table")
    return [
        [data[ends[at] : ends[at + 1]], *rest[lasts[at] : lasts[at + 1]]]  # its pickle, and its buffers
        for at in range(count)
    ]
