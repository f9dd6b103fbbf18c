"""The user's interface to calls: ``@sky.function``, `Call`, and the operators that run a call on a pool.

``train(x)`` is a `Call`, a value that has not run. An operator with a pool runs it; each operator is one line that
calls a named method of the pool.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NoReturn, ParamSpec, Protocol, TypeVar, cast, overload

from skyfab._util.signals import SIGNAL_GUARD
from skyfab.calls.stream import parameters
from skyfab.context import yields
from skyfab.errors import NotPicklable, UsageError

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class _Options(TypedDict, total=False):
        timeout: float | None
        retries: int
        stall: float | None
        ahead: int
        gpus: float


P = ParamSpec("P")
R = TypeVar("R")
Errors = Literal["raise", "return"]

AHEAD: Final = 64
"""Values of a generator that are sent before they are used, at most."""
BY_VALUE: Final = {"__main__", "__mp_main__"}
"""Modules that hosts do not import: what they define is pickled by value."""


class Pool(Protocol):
    """Runs calls. Implemented by `Compute`."""

    def run(self, call: Call[R]) -> R:
        """Runs it on one worker and waits for the result."""

    def broadcast(self, call: Call[R]) -> list[R]:
        """Runs it on every rank and waits for the results."""

    def submit(self, call: Call[R], *, on: str = "one") -> Future[R]:
        """Starts it without waiting."""

    def gather(self, *calls: Call[Any] | Group) -> tuple[Any, ...] | Iterator[Any]:
        """Runs the calls in parallel."""


def _pool(compute: Pool) -> Pool:
    """Raises UsageError if it is something else, such as the name of a host."""
    if not hasattr(compute, "broadcast"):
        hosts = repr(compute) if isinstance(compute, str) else "…"
        raise UsageError(f"not a pool: {compute!r:.80}", hint=f"with sky.Compute({hosts}) as compute: …")
    return compute


def check_seconds(name: str, value: object, least: float = 0.0) -> None:
    """Raises UsageError if it is not a number of seconds above 0, and not less than `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 < value < math.inf and value >= least):
        raise UsageError(f"invalid {name}={value!r}: expected seconds, {f'at least {least:g}' if least else 'above 0'}")


def check_gpus(gpus: object) -> None:
    """Raises UsageError if it is neither a number of GPUs nor a share of one."""
    if not (type(gpus) is int and gpus >= 0) and not (isinstance(gpus, float) and 0 < gpus < 1):
        raise UsageError(f"invalid gpus={gpus!r}: expected a whole number, 0 or more, or a share of one such as 0.5")


class Function(Generic[P, R]):
    """A function that runs on hosts; `function` makes it. Calling it returns a `Call`; the plain function is `.fn`."""

    def __init__(
        self,
        fn: Callable[P, R],
        *,
        timeout: float | None = None,
        retries: int = 0,
        stall: float | None = None,
        ahead: int = AHEAD,
        gpus: float = 0,
    ) -> None:
        for name, seconds in (("timeout", timeout), ("stall", stall)):
            if seconds is not None:
                check_seconds(name, seconds)
        if type(retries) is not int or retries < 0:
            raise UsageError(f"invalid retries={retries!r}: expected 0 or more")
        if type(ahead) is not int or ahead < 0:
            raise UsageError(f"invalid ahead={ahead!r}: expected 0 or more")
        check_gpus(gpus)
        self.fn = fn
        self.ahead = ahead
        """How many values of a generator are sent before they are used."""
        self.gpus = gpus
        """How many GPUs a call on one worker has for itself, or which share of one."""
        self.stall = stall
        """Seconds without progress after which the stacks of its processes are reported."""
        self.retries = retries
        """How often a failed broadcast is restarted on all ranks, or a solo call is moved from a lost host."""
        self.timeout = timeout
        """Seconds after which a call is stopped on its host."""
        self.packed: Any = None
        """Cache of the packed function, with the state that it was made from: see `pack_function`."""
        functools.update_wrapper(self, fn)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        return Call(self, args, kwargs)

    @property
    def _name(self) -> str:
        return str(getattr(self.fn, "__qualname__", ""))

    @functools.cached_property
    def label(self) -> str:
        return (self._name or repr(self.fn)).replace("<locals>.", "")

    @functools.cached_property
    def yields(self) -> bool:
        """It is a generator function: a call returns an iterator."""
        return yields(self.fn)

    @functools.cached_property
    def iterators(self) -> frozenset[int | str]:
        """Its parameters that are annotated as iterators, by position and by name."""
        return parameters(self.fn)

    @property
    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("timeout", "retries", "stall", "ahead", "gpus")}

    def rewrap(self, decorate: Callable[[Callable[P, R]], Callable[P, R]]) -> Function[P, R]:
        """A copy with the decorator `decorate` around the plain function."""
        return Function(decorate(self.fn), **self._options)

    def __repr__(self) -> str:
        return f"<sky.function {self.label}>"

    def _uncalled(self, compute: object) -> NoReturn:
        raise not_a_call(self)

    __rshift__ = __matmul__ = __gt__ = __and__ = _uncalled

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickled by name if a host can import it, as functions are; else by value."""
        return self._name if self.is_importable else (_rebuild, (self.fn, self._options))

    @property
    def is_importable(self) -> bool:
        """A host can import it by name, from a module that is sent or installed."""
        home = getattr(self.fn, "__module__", None)
        module = sys.modules.get(home) if isinstance(home, str) else None
        if module is None or home in BY_VALUE or not self._name:
            return False
        found: Any = module
        for name in self._name.split("."):
            found = getattr(found, name, None)
        return found is self


def _rebuild(fn: Callable[P, R], options: dict[str, Any]) -> Function[P, R]:
    return Function(fn, **options)


@overload
def function(  # R is what the coroutine returns
    fn: Callable[P, Coroutine[Any, Any, R]], /, **options: Unpack[_Options]
) -> Function[P, R]: ...
@overload
def function(fn: Callable[P, R], /, **options: Unpack[_Options]) -> Function[P, R]: ...
@overload
def function(**options: Unpack[_Options]) -> Callable[[Callable[P, R]], Function[P, R]]: ...
def function(
    fn: Any = None,
    /,
    *,
    timeout: float | None = None,
    retries: int = 0,
    stall: float | None = None,
    ahead: int = AHEAD,
    gpus: float = 0,
) -> Any:
    """Decorates the function `fn` to run on hosts: ``@sky.function`` or ``@sky.function(timeout=60, retries=2)``.

    A call is stopped on its host after `timeout` seconds, and raises CallTimeout. A broadcast (``@``) that fails is
    restarted on all ranks, up to `retries` times; the number of restarts is in ``instance_info().attempt``. Any other
    call is moved to another host if its host is lost, so it may run twice. If a rank makes no progress for `stall`
    seconds, the stacks of all ranks are shown, grouped; the call continues. An ``async def`` runs in its own event
    loop. A call of a generator function returns an iterator; up to `ahead` values are sent before they are used.
    A call on one worker has `gpus` GPUs for itself, or that share of one such as 0.5 (docs/gpus.md).
    """
    made = functools.partial(Function, timeout=timeout, retries=retries, stall=stall, ahead=ahead, gpus=gpus)
    return made if fn is None else made(fn)


class Call(Generic[R]):
    """A function with its arguments, ready to run on a pool. Immutable."""

    __slots__ = ("args", "function", "kwargs")

    def __init__(self, function: Function[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs

    def __rshift__(self, compute: Pool) -> R:
        return _pool(compute).run(self)

    def __matmul__(self, compute: Pool) -> list[R]:
        return _pool(compute).broadcast(self)

    def __gt__(self, compute: Pool) -> Future[R]:
        return _pool(compute).submit(self)

    def __and__(self, other: Call[Any] | Group) -> Group:
        return gather(self, *(other.calls if isinstance(other, Group) else (other,)))

    def _has_not_run(self, *_: object) -> NoReturn:
        raise TypeError(f"{self.function.label}(…) has not run: write {self.function.label}(…) >> compute")

    if not TYPE_CHECKING:  # type checkers do not check what follows NoReturn
        __bool__ = __iter__ = _has_not_run

    def __repr__(self) -> str:
        return f"<call of {self.function.label}; to run it: call >> compute>"


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Calls that run in parallel."""

    calls: tuple[Call[Any], ...]
    stream: bool = False
    ordered: bool = True
    errors: Errors = "raise"

    def __rshift__(self, compute: Pool) -> Any:
        return _pool(compute).gather(self)

    def __and__(self, other: Call[Any] | Group) -> Group:
        more = other.calls if isinstance(other, Group) else (other,)
        return Group((*self.calls, *more), self.stream, self.ordered, self.errors)

    def results(self, submit: Callable[[Call[Any]], Future[Any]]) -> tuple[Any, ...] | Iterator[Any]:
        """Starts its calls with `submit`, and returns their results as a tuple or an iterator.

        A failure, or Ctrl-C, cancels those that still run.
        """
        futures: list[Future[Any]] = []
        try:
            for call in self.calls:
                with SIGNAL_GUARD:  # what was started is known here, to be cancelled
                    futures.append(self._start(call, submit))
            if self.stream:
                stream = _stream(futures, futures if self.ordered else as_completed(futures), self.errors)
                next(stream)  # start the generator, so that dropping it cancels the rest
                return stream
            return tuple([_outcome(future, self.errors) for future in futures])
        except BaseException:
            _cancel(futures)
            raise

    def _start(self, call: Call[Any], submit: Callable[[Call[Any]], Future[Any]]) -> Future[Any]:
        try:
            return submit(call)
        except NotPicklable as error:
            if self.errors == "raise":
                raise
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed


def _stream(futures: Sequence[Future[Any]], order: Iterable[Future[Any]], errors: Errors) -> Iterator[Any]:
    try:
        yield
        for future in order:
            yield _outcome(future, errors)
    finally:
        _cancel(futures)


def _outcome(future: Future[Any], errors: Errors) -> Any:
    error = future.exception() if errors == "return" else None
    return error if isinstance(error, Exception) else future.result()


def _cancel(futures: Sequence[Future[Any]]) -> None:
    for future in futures:
        future.cancel()


def gather(*calls: Call[Any], stream: bool = False, ordered: bool = True, errors: Errors = "raise") -> Group:
    """Runs calls in parallel: ``sky.gather(f(1), f(2)) >> compute`` is a tuple of their results.

    With `stream` it is an iterator that yields each result as soon as possible: in the order of the calls or, with
    ``ordered=False``, in the order of completion. A failure cancels the rest; with ``errors="return"`` its exception
    takes the place of the result, and the rest continues.
    """
    check_errors(errors)
    for call in calls:
        if not isinstance(call, Call):
            raise TypeError(f"gather() takes calls such as f(1), not {call!r:.80}; put * before a list")
    return Group(calls, stream, ordered, errors)


def check_errors(errors: str) -> None:
    """Raises UsageError for an invalid ``errors=``."""
    if errors not in ("raise", "return"):
        raise UsageError(f"invalid errors={errors!r}: expected 'raise' or 'return'")


def as_group(calls: Sequence[Call[Any] | Group]) -> Group:
    """A group that is alone, or a new one of these calls. Raises TypeError for anything else."""
    if len(calls) == 1 and isinstance(calls[0], Group):
        return calls[0]
    return gather(*cast("Sequence[Call[Any]]", calls))


def as_function(fn: Any) -> Function[..., Any]:
    """`fn` itself, or a plain callable wrapped in a `Function`. Raises TypeError for anything else."""
    if isinstance(fn, Function):
        return fn
    if not callable(fn):
        raise TypeError(f"not a function: {fn!r:.80}")
    return Function(fn)


def not_a_call(value: object) -> UsageError:
    """The error for a value where a call was expected."""
    if isinstance(value, Function):
        what = f"{value.label} is a function, not a call: write {value.label}(…), with its arguments"
    elif callable(value):
        name = getattr(value, "__qualname__", "f")
        what = f"{name} is a plain function: decorate it with @sky.function, and write {name}(…)"
    else:
        what = f"{value!r:.80} is a value, not a call: is the function that returned it decorated with @sky.function?"
    return UsageError(what)
