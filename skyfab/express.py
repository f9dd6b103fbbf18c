"""Express: the shortest way of a call, for those that are small and wait for nobody.

The caller's own thread sends one frame to an idle process and reads its answer: no queue, no future, no other thread.
Whatever does not fit (a queue, a first call, large arguments) goes the usual way, through `dispatch`.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

from skyfab.answers import resolve, unpickle
from skyfab.dispatch import Queue, Slot
from skyfab.errors import SkyfabError
from skyfab.inbox import Reply
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
    host = slot.node.name
    ended = queue.started(label, host)
    try:
        reply = _exchange(queue, slot, function, arguments.data, timeout)
        if reply.value is not None:
            result = unpickle(reply.value, [], host=host, rank=None, label=label)
        else:
            assert reply.found is not None
            message, buffers = reply.found
            if isinstance(message, messages.Ended) and message.why == "unstarted":
                return UNFIT  # its process ended before: another one takes it
            result = resolve(message, buffers, host=host, rank=None, label=label)
    except BaseException as error:
        ended(error)
        raise
    ended(None)
    return result


def _exchange(queue: Queue, slot: Slot, function: FunctionParcel, data: bytes, timeout: float | None) -> Reply:
    """Sends the call, waits for its answer and frees the slot. An interrupt stops the call."""
    node = slot.node
    reply: Reply | None = None
    try:
        reply = node.begin(slot.seat, slot.plan, function, data, timeout=timeout)
        node.session.await_reply(reply)
    except BaseException:
        if reply is None or reply.is_there():
            queue.release(slot)
        else:
            reply.leave(lambda: queue.release(slot))
            with contextlib.suppress(SkyfabError):  # a host that is gone has stopped it already
                node.cancel(reply.stream)
        raise
    queue.release(slot)
    return reply
