"""The fast path for small calls when a worker is idle.

The caller's own thread sends one frame to the idle worker and reads the reply: no queue, no future, no other thread.
Calls that do not qualify (others are queued, no worker is idle, large arguments) go through the scheduler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

from skyfab.calls.pack import PackedFunction
from skyfab.calls.results import unpack_result, unpickle
from skyfab.errors import CallCancelled, SkyfabError
from skyfab.pool.scheduler import Scheduler, Slot
from skyfab.protocol import codec, messages
from skyfab.protocol.mux import SMALL
from skyfab.session.replies import Reply
from skyfab.session.sigint import SIGINT_GUARD

NOT_TAKEN: Final = object()
"""The call was not made: it must go through the scheduler."""


def fastpath(
    scheduler: Scheduler, function: PackedFunction, arguments: codec.Payload, *, label: str, timeout: float | None
) -> Any:
    """The call's result, or NOT_TAKEN. Raises what the call raises."""
    if arguments.buffers or len(arguments.data) > SMALL or function.payload.buffers:
        return NOT_TAKEN
    with SIGINT_GUARD:  # only the wait for the reply can be interrupted, so a reserved slot is always released
        slot = scheduler.reserve()
        if slot is None:
            return NOT_TAKEN
        host = slot.node.name
        reply: Reply | None = None
        ended: Callable[[BaseException | None], None] = _unacked_bytes
        try:
            ended = scheduler.started(label, host)
            reply = slot.node.begin(slot.worker, slot.plan, function, arguments.data, timeout=timeout)
            slot.node.session.await_reply(reply)
        except BaseException as error:
            _give_up(scheduler, slot, reply)
            if isinstance(error, KeyboardInterrupt):
                vars(error)["stopped"] = f"stopped on {host}"
            ended(CallCancelled("interrupted") if isinstance(error, KeyboardInterrupt) else error)
            raise
        scheduler.release(slot)
    try:
        if reply.value is not None:
            result = unpickle(reply.value, (), host=host, rank=None, label=label, untrusted=scheduler.untrusted)
        else:
            result = _result(reply, host, label, scheduler.untrusted)
    except BaseException as error:
        ended(error)
        raise
    # Not taken: the scheduler starts it again, and emits a start and an end of its own.
    ended(CallCancelled("its worker had exited before it began") if result is NOT_TAKEN else None)
    return result


def _result(reply: Reply, host: str, label: str, untrusted: bool) -> Any:
    assert reply.found is not None
    message, buffers = reply.found
    if isinstance(message, messages.Ended) and message.why == "unstarted":
        return NOT_TAKEN  # the worker exited before it started the call: the scheduler uses another one
    return unpack_result(message, buffers, host=host, rank=None, label=label, untrusted=untrusted)


def _give_up(scheduler: Scheduler, slot: Slot, reply: Reply | None) -> None:
    """After an interrupt or a lost host: cancels the call if it still runs, and frees the slot once it has ended."""
    if reply is None or reply.is_there():
        scheduler.release(slot)
        return
    reply.leave(lambda: scheduler.release(slot))
    with contextlib.suppress(SkyfabError):  # the host is lost: there is nothing to cancel
        slot.node.cancel(reply.stream)


def _unacked_bytes(error: BaseException | None) -> None:
    """Used until the start of the call has been reported."""
