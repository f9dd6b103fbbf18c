"""Calls: what the user says.

``train(x)`` is a `Call`, a value that has not run. An operator with a pool runs it; each is one line over a method
of the pool that has a name.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from typing import Any, Final, Generic, ParamSpec, Protocol, TypeVar, overload

P = ParamSpec("P")
R = TypeVar("R")

MAIN: Final = ("__main__", "__mp_main__")
"""The program's own module; the second name is multiprocessing's, in children that it has spawned."""


class Pool(Protocol):
    """What runs calls: a `Compute`."""

    def run(self, call: Call[R]) -> R:
        """On one rank."""

    def broadcast(self, call: Call[R]) -> list[R]:
        """On every rank."""

    def submit(self, call: Call[R], *, on: str = "one") -> Future[R]:
        """Starts it."""

    def gather(self, group: Group) -> tuple[Any, ...] | Iterator[Any]:
        """Side by side."""


class Function(Generic[P, R]):
    """A function that runs on hosts. Calling it makes a `Call`; the plain function is `.fn`."""

    def __init__(
        self, fn: Callable[P, R], *, timeout: float | None = None, retries: int = 0, stall: float | None = None
    ) -> None:
        self.fn = fn
        self.stall = stall
        """Seconds without progress after which it is told where its processes are."""
        self.retries = retries
        """How often a broadcast that failed is started again on all ranks, and a call is moved from a lost host."""
        self.timeout = timeout
        """Seconds after which a call is stopped on its host."""
        self.packed: Any = None
        """Its parcel, and what that was made from: see `packed`."""
        functools.update_wrapper(self, fn)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        return Call(self, args, kwargs)

    @property
    def _name(self) -> str:
        return str(getattr(self.fn, "__qualname__", ""))

    @functools.cached_property
    def label(self) -> str:
        return (self._name or repr(self.fn)).replace("<locals>.", "")

    def rewrap(self, decorate: Callable[[Callable[P, R]], Callable[P, R]]) -> Function[P, R]:
        """The same with a decorator around the plain function."""
        return Function(decorate(self.fn), timeout=self.timeout, retries=self.retries, stall=self.stall)

    def __repr__(self) -> str:
        return f"<sky.function {self.label}>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        """By name where a host can import it, as functions are; else by value."""
        return self._name if self.is_importable else (_rebuild, (self.fn, self.timeout, self.retries, self.stall))

    @property
    def is_importable(self) -> bool:
        """A host finds it by its name, in a module that is sent or installed."""
        home = getattr(self.fn, "__module__", None)
        module = sys.modules.get(home) if isinstance(home, str) else None
        if module is None or home in MAIN or not self._name:
            return False
        found: Any = module
        for name in self._name.split("."):
            found = getattr(found, name, None)
        return found is self


def _rebuild(fn: Callable[P, R], timeout: float | None, retries: int, stall: float | None) -> Function[P, R]:
    return Function(fn, timeout=timeout, retries=retries, stall=stall)


@overload
def function(fn: Callable[P, Coroutine[Any, Any, R]], /) -> Function[P, R]: ...  # what it returns in the end
@overload
def function(fn: Callable[P, R], /) -> Function[P, R]: ...
@overload
def function(
    *, timeout: float | None = None, retries: int = 0, stall: float | None = None
) -> Callable[[Callable[P, R]], Function[P, R]]: ...
def function(fn: Any = None, /, *, timeout: float | None = None, retries: int = 0, stall: float | None = None) -> Any:
    """Makes a function one that runs on hosts: ``@sky.function`` or ``@sky.function(timeout=60, retries=2)``.

    A broadcast (``@``) that fails is started again on all ranks, as often as `retries` says; the function finds out
    from ``instance_info().attempt`` how often that has happened. Any other call is moved to another host when its host
    is lost: it may then have run twice. When a rank has stood still for `stall` seconds, the
    stacks of all of them are shown, alike ones together; the call goes on. An ``async def`` runs in an event loop of
    its own.
    """
    if fn is None:
        return lambda fn: Function(fn, timeout=timeout, retries=retries, stall=stall)
    return Function(fn)


class Call(Generic[R]):
    """A function with its arguments, ready to run somewhere. A value: nothing changes it."""

    __slots__ = ("args", "function", "kwargs")

    def __init__(self, function: Function[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs

    def __rshift__(self, compute: Pool) -> R:
        return compute.run(self)

    def __matmul__(self, compute: Pool) -> list[R]:
        return compute.broadcast(self)

    def __gt__(self, compute: Pool) -> Future[R]:
        return compute.submit(self)

    def __and__(self, other: Call[Any] | Group) -> Group:
        return gather(self, *(other.calls if isinstance(other, Group) else (other,)))

    def __bool__(self) -> bool:
        raise TypeError(f"{self.function.label}(…) has not run: write {self.function.label}(…) >> compute")

    def __repr__(self) -> str:
        return f"<call of {self.function.label}>"


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Calls that run side by side."""

    calls: tuple[Call[Any], ...]
    stream: bool = False
    ordered: bool = True

    def __rshift__(self, compute: Pool) -> Any:
        return compute.gather(self)

    def __and__(self, other: Call[Any] | Group) -> Group:
        more = other.calls if isinstance(other, Group) else (other,)
        return Group((*self.calls, *more), self.stream, self.ordered)

    def results(self, futures: Sequence[Future[Any]]) -> tuple[Any, ...] | Iterator[Any]:
        """What its calls return, as was asked for. On a failure, or Ctrl-C, those that still run are cancelled."""
        if self.stream:
            stream = _stream(futures, futures if self.ordered else as_completed(futures))
            next(stream)  # begun, so that dropping it cancels what still runs
            return stream
        try:
            return tuple([future.result() for future in futures])
        except BaseException:
            _cancel(futures)
            raise


def _stream(futures: Sequence[Future[Any]], order: Iterable[Future[Any]]) -> Iterator[Any]:
    try:
        yield
        for future in order:
            yield future.result()
    finally:
        _cancel(futures)


def _cancel(futures: Sequence[Future[Any]]) -> None:
    for future in futures:
        future.cancel()


def gather(*calls: Call[Any], stream: bool = False, ordered: bool = True) -> Group:
    """Runs calls side by side: ``sky.gather(f(1), f(2)) >> compute`` is a tuple of their results.

    With `stream` it is an iterator that yields each result as soon as it may: in the order of the calls, or with
    ``ordered=False`` as they come.
    """
    for call in calls:
        if not isinstance(call, Call):
            raise TypeError(f"gather() takes calls such as f(1), not {call!r:.80}")
    return Group(calls, stream, ordered)


def as_function(fn: Any) -> Function[..., Any]:
    """`fn` itself, or a plain function made one that runs on hosts."""
    if isinstance(fn, Function):
        return fn
    if not callable(fn):
        raise TypeError(f"not a function: {fn!r:.80}")
    return Function(fn)
