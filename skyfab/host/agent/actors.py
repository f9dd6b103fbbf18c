"""The host's part of actors: the object that a process keeps, calls of its methods, and handles of other actors."""

from __future__ import annotations

import threading
import time
from types import AsyncGeneratorType, CoroutineType

from skyfab import context
from skyfab.host.agent.functions import show_lines
from skyfab.host.agent.outcomes import describe, exited
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


def construct(kind: Any, arguments: tuple[Any, ...], options: dict[str, Any], *, sources: dict[str, str]) -> None:
    """Makes the object. `sources` are those of its class."""
    global _object, _failure
    show_lines(sources)
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
        return context.from_async(result, _await)
    return result


def _await(coroutine: Any) -> Any:
    import asyncio

    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, daemon=True).start()
    value, error = asyncio.run_coroutine_threadsafe(_caught(coroutine), _loop).result()
    if error is not None:
        raise error
    return value


async def _caught(coroutine: Any) -> tuple[Any, BaseException | None]:
    """What it returns, and what it raises that would end the event loop."""
    try:
        return await coroutine, None
    except (KeyboardInterrupt, SystemExit) as error:
        return None, error


def invoke_all(calls: list[tuple[Any, ...]]) -> tuple[float, list[Any]]:
    """Calls a method several times, each time with the pickled arguments of `invoke`.

    Returns the seconds that it took, and for each call its pickled result, or a list with the reply if it has raised.
    """
    began = time.perf_counter()
    found = [_outcome(*call) for call in calls]
    return time.perf_counter() - began, found


def _outcome(*packed: Any) -> Any:
    try:
        *arguments, options = codec.loads(packed[0], packed[1:])
        payload = codec.dumps(invoke(*arguments, **options or {}))
    except SystemExit as error:
        return [exited(error).encode()]
    except BaseException as error:  # also KeyboardInterrupt: it must not end the other calls
        message, exception = describe(error, codec)
        parts = () if exception is None else (exception.data, *map(bytearray, exception.buffers))
        return [message.encode(), *parts]
    return (payload.data, *map(bytearray, payload.buffers))


# ---- handles


def _operator(name: str) -> Any:
    return lambda self, /, *args, **kwargs: self._method(name)(*args, **kwargs)


class Methods:
    """Base class of handles: an attribute is a method of the actor's object, and operators are methods of it."""

    __call__, __contains__, __len__ = map(_operator, ("__call__", "__contains__", "__len__"))
    __getitem__, __setitem__, __delitem__ = map(_operator, ("__getitem__", "__setitem__", "__delitem__"))
    __iter__ = None  # else Python would try the keys 0, 1, 2 …

    def _method(self, name: str) -> Any:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python and pickle look for such names, and must not find them
            raise AttributeError(name)
        return self._method(name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"the state of an actor is on its host: add a method that sets {name}")

    def __bool__(self) -> bool:
        return True


class RemoteHandle(Methods):
    """A handle of an actor, in a function on a host."""

    def __init__(self, actor: str, label: str) -> None:
        vars(self).update(_actor=actor, _label=label)

    def _method(self, name: str) -> RemoteMethod:
        return RemoteMethod(self._actor, self._label, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteHandle, (self._actor, self._label)

    def __repr__(self) -> str:
        return f"<actor {self._label}>"


class RemoteMethod:
    """A method of an actor, in a function on a host: the program that opened the pool passes the call on."""

    def __init__(self, actor: str, label: str, name: str) -> None:
        self._about = (actor, name)
        self._label = label

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return _ask(*self._about, args, kwargs)

    def submit(self, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Calls the method; returns the future of its result."""
        from concurrent.futures import ThreadPoolExecutor

        thread = ThreadPoolExecutor(1)
        future = thread.submit(self, *args, **kwargs)
        thread.shutdown(wait=False)  # it ends when the call has
        return future

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (RemoteHandle(self._about[0], self._label), self._about[1])

    def __repr__(self) -> str:
        return f"<method {self._about[1]} of the actor {self._label}>"


def _ask(actor: str, method: str, *about: Any) -> Any:
    """Has the client call an actor. If the method yields, the reply is the number of the iterator that it has."""
    found, value = context.ask_client((actor, method, about))
    if found == "raised":
        raise value
    if found == "yields":
        value = _values(value)
        next(value)  # starts it, so that dropping it ends the method
    return value


def _values(number: int) -> Iterator[Any]:
    try:
        yield
        while True:
            yield _ask("", "next", number)
    except StopIteration:
        return
    finally:  # on a new thread: the garbage collector may close it with any lock held
        threading.Thread(target=_ask, args=("", "close", number), daemon=True).start()
