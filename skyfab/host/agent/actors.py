"""The host's part of an actor: the object that its process keeps, and calls of its methods."""

from __future__ import annotations

import time

from skyfab.context import awaited
from skyfab.host.agent.worker import describe
from skyfab.protocol import codec

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from typing import Any

_object: Any = None
"""That of this process."""


def construct(kind: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Makes the object."""
    global _object
    _object = kind(*arguments, **options)


def invoke(name: str, /, *arguments: Any, **options: Any) -> Any:
    """Calls a method of the object. Raises TypeError for an attribute that is not a method."""
    method = getattr(_object, name)
    if not callable(method):
        kind = type(_object).__qualname__
        raise TypeError(
            f"{kind}.{name} is not a method but a {type(method).__qualname__}: add a method that returns it"
        )
    return method(*arguments, **options)


def invoke_all(name: str, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> tuple[float, list[Any]]:
    """Calls a method several times: the seconds that it took, and for each call its pickled result, or a list that
    describes what it raised."""
    began = time.perf_counter()
    found = [_outcome(name, arguments, options) for arguments, options in calls]
    return time.perf_counter() - began, found


def _outcome(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    try:
        payload = codec.dumps(awaited(invoke(name, *arguments, **options)))
    except Exception as error:
        message, payload_of_error = describe(error, codec)
        parts = () if payload_of_error is None else (payload_of_error.data, *map(bytes, payload_of_error.buffers))
        return [message.kind, message.text, message.traceback, *parts]
    return (payload.data, *map(bytes, payload.buffers))
