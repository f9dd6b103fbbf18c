"""Answers: what a host sent back, as a value or as the exception to raise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyfab.errors import (
    CallCancelled,
    CallTimeout,
    NotPicklable,
    ProtocolError,
    RankDied,
    RemoteError,
    RemoteTraceback,
)
from skyfab.protocol import codec, messages
from skyfab.protocol.messages import Message
from skyfab.protocol.streams import Buffer


def resolve(message: Message, buffers: list[memoryview], *, host: str, rank: int | None, label: str) -> Any:
    """The value that a call returned. Raises the exception that it raised, with the host's traceback as cause."""
    if isinstance(message, messages.Result):
        return unpickle(buffers[0], buffers[1:], host=host, rank=rank, label=label)
    if isinstance(message, messages.Raised):
        raise _exception(message, buffers, host, rank) from RemoteTraceback(message.traceback, host, rank)
    if isinstance(message, messages.Ended):
        cause = RemoteTraceback(message.traceback, host, rank) if message.traceback else None
        raise _ending(message, host, rank, label) from cause
    if isinstance(message, messages.Failed):
        raise RankDied(message.text, host=host, rank=rank, hint=message.hint)
    raise ProtocolError(f"{message.op} where a result was expected", host=host)


def unpickle(data: Buffer, buffers: Sequence[memoryview], *, host: str, rank: int | None, label: str) -> Any:
    """A result's value. Raises NotPicklable."""
    try:
        return codec.loads(data, buffers)
    except Exception as error:
        raise NotPicklable(
            f"the result of {label} cannot be unpickled here: {type(error).__name__}: {error}",
            host=host,
            rank=rank,
            hint="is everything that it consists of installed on this machine too?",
        ) from error


def _exception(message: messages.Raised, buffers: list[memoryview], host: str, rank: int | None) -> BaseException:
    """The exception itself; a RemoteError in its place where it cannot travel."""
    if buffers:
        try:
            found = codec.loads(buffers[0], buffers[1:])
        except Exception:
            found = None
        if isinstance(found, Exception):
            if isinstance(found, ModuleNotFoundError) and hasattr(found, "add_note"):
                found.add_note(f"hint: on {host}: Image(pip=[…]) installs packages, Image(includes=[…]) sends your own")
            return found
    return RemoteError(f"{message.kind}: {message.text}", kind=message.kind, host=host, rank=rank)


def _ending(message: messages.Ended, host: str, rank: int | None, label: str) -> Exception:
    why, text = message.why, message.text
    if why in ("exit", "died"):
        hint = None
        if message.exitcode == -9 and "memory" in text:
            hint = "give it less at a time, or run fewer ranks on this host (ranks=…)"
        elif message.exitcode == -11:
            hint = "the lines above from faulthandler show where"
        return RankDied(f"{label}: {text}", exitcode=message.exitcode, host=host, rank=rank, hint=hint)
    if why == "timeout":
        return CallTimeout(f"{label} took longer than its timeout and was stopped", host=host, rank=rank)
    if why == "cancelled":
        return CallCancelled(f"{label} was cancelled", host=host, rank=rank)
    if why == "unpicklable":
        return NotPicklable(f"{label}: {text}", host=host, rank=rank, hint="return plain data, arrays or tensors")
    return RankDied(f"{label} ended: {why} {text}".rstrip(), exitcode=message.exitcode, host=host, rank=rank)
