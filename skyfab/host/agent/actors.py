"""The host's part of actors: the object that a process keeps, calls of its methods, and handles of other actors."""

from __future__ import annotations

import threading
import time
from types import AsyncGeneratorType, CoroutineType

from skyfab import context
from skyfab.host.agent.outcomes import describe
from skyfab.protocol import codec

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Iterator
    from concurrent.futures import Future
    from typing import Any

_object: Any = None
"""The object of this process."""
_failure: BaseException | None = None
"""What making it raised."""
_made = threading.Event()
"""Set when one of the two is known: calls may arrive earlier, and run on other threads."""
_loop: AbstractEventLoop | None = None
"""The event loop of its asynchronous methods, from the first call of one."""
_lock = threading.Lock()
"""Held while the event loop is made."""


def construct(kind: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Makes the object."""
    global _object, _failure
    try:
        _object = kind(*arguments, **options)
    except BaseException as error:
        _failure = error
        raise
    finally:
        _made.set()


def invoke(name: str, /, *arguments: Any, **options: Any) -> Any:
    """Calls a method of the object. Raises TypeError for an attribute that is not a method."""
    _made.wait()
    if _failure is not None:
        raise _failure
    method = getattr(_object, name)
    if not callable(method):
        kind = type(_object).__qualname__
        raise TypeError(
            f"{kind}.{name} is not a method, its type is {type(method).__qualname__}: add a method that returns it"
        )
    return _settled(method(*arguments, **options))


def _settled(result: Any) -> Any:
    """Runs what an asynchronous method has returned, in the one event loop of the object."""
    if isinstance(result, CoroutineType):
        return _await(result)
    if isinstance(result, AsyncGeneratorType):
        return _from_async(result)
    return result


def _await(coroutine: Any) -> Any:
    import asyncio

    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, daemon=True).start()
    return asyncio.run_coroutine_threadsafe(coroutine, _loop).result()


def _from_async(values: Any) -> Iterator[Any]:
    try:
        while True:
            try:
                value = _await(values.__anext__())
            except StopAsyncIteration:
                return
            yield value
    finally:
        _await(values.aclose())


def invoke_all(name: str, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> tuple[float, list[Any]]:
    """Calls a method several times.

    Returns the seconds that it took, and for each call its pickled result, or a list that describes what it raised.
    """
    began = time.perf_counter()
    found = [_outcome(name, arguments, options) for arguments, options in calls]
    return time.perf_counter() - began, found


def _outcome(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    try:
        payload = codec.dumps(invoke(name, *arguments, **options))
    except Exception as error:
        message, exception = describe(error, codec)
        parts = () if exception is None else (exception.data, *map(bytes, exception.buffers))
        return [message.kind, message.text, message.traceback, *parts]
    return (payload.data, *map(bytes, payload.buffers))


# ---- handles of other actors


class RemoteMethod:
    """A method of an actor, in a function on a host: the program that opened the pool passes the call on."""

    def __init__(self, actor: str, label: str, name: str) -> None:
        self._about = (actor, name)
        self._label = label

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        found, value = context.ask_client((*self._about, args, kwargs))
        if not found:
            raise value
        return value

    def submit(self, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Calls the method; returns the future of its result."""
        from concurrent.futures import Future

        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(self(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future

    def __repr__(self) -> str:
        return f"<method {self._about[1]} of the actor {self._label}>"


class RemoteHandle:
    """A handle of an actor, in a function on a host."""

    def __init__(self, actor: str, label: str) -> None:
        self._actor = actor
        self._label = label

    def __getattr__(self, name: str) -> RemoteMethod:
        if name.startswith("__"):  # Python and pickle look for such names, and must not find them
            raise AttributeError(name)
        return RemoteMethod(self._actor, self._label, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteHandle, (self._actor, self._label)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return RemoteMethod(self._actor, self._label, "__call__")(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return RemoteMethod(self._actor, self._label, "__getitem__")(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        RemoteMethod(self._actor, self._label, "__setitem__")(key, value)

    def __contains__(self, item: Any) -> bool:
        return bool(RemoteMethod(self._actor, self._label, "__contains__")(item))

    def __len__(self) -> int:
        return int(RemoteMethod(self._actor, self._label, "__len__")())

    def __repr__(self) -> str:
        return f"<actor {self._label}>"
