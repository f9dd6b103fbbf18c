"""Express: the shortest way of a call, for those that are small and wait for nobody.

The caller's own thread sends one frame to an idle process and reads its answer: no queue, no future, no other thread.
Whatever does not fit (a queue, a first call, large arguments) goes the usual way, through `dispatch`.
"""

from __future__ import annotations

from typing import Any, Final

from skyfab.answers import resolve
from skyfab.dispatch import Queue, Slot
from skyfab.parcel import FunctionParcel
from skyfab.protocol import codec, messages
from skyfab.protocol.streams import SMALL

UNFIT: Final = object()
"""The call was not made: it must go the usual way."""


def express(
    queue: Queue, function: FunctionParcel, arguments: codec.Payload, *, label: str, timeout: float | None
) -> Any:
    """The call's result, or UNFIT. Raises what the call raises."""
    if arguments.buffers or len(arguments.data) > SMALL or function.payload.buffers:
        return UNFIT
    slot = queue.reserve()
    if slot is None:
        return UNFIT
    ended = queue.started(label, slot.node.name)
    try:
        message, buffers = _exchange(queue, slot, function, arguments.data, timeout)
        if isinstance(message, messages.Ended) and message.why == "unstarted":
            return UNFIT  # its process ended before: another one takes it
        result = resolve(message, buffers, host=slot.node.name, rank=None, label=label)
    except BaseException as error:
        ended(error)
        raise
    ended(None)
    return result


def _exchange(
    queue: Queue, slot: Slot, function: FunctionParcel, data: bytes, timeout: float | None
) -> tuple[messages.Message, list[memoryview]]:
    """Sends the call, waits for its answer and frees the slot. An interrupt stops the call first."""
    node = slot.node
    try:
        reply = node.begin(slot.seat, slot.plan, function, data, timeout=timeout)
        try:
            return node.session.await_reply(reply)
        except KeyboardInterrupt:
            node.cancel(reply.stream)
            node.session.await_reply(reply)
            raise
    finally:
        queue.release(slot)
