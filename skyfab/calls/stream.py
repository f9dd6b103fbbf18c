"""``sky.stream``: an argument that is read on the host while it is produced here."""

from __future__ import annotations

import itertools
import re
import threading
import typing
from abc import abstractmethod
from collections.abc import AsyncIterator, Generator, Iterable, Iterator
from typing import Any, Final, Generic, TypeVar

from skyfab import context
from skyfab.errors import NotPicklable

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_KINDS: Final = (Iterator, Iterable, Generator)
_ANNOTATION: Final = re.compile(r"(\w+\.)*(Iterator|Iterable|Generator)\b")
"""An annotation that is text, as ``from __future__ import annotations`` makes them."""


class Values(Iterator[T_co], AsyncIterator[T_co]):
    """The values of a generator that runs on a host, as they come; also for ``async for``.

    `close`, the end of a ``with`` block and dropping it end the generator on the host; its ``finally`` blocks run.
    """

    @abstractmethod
    def close(self) -> None:
        """Ends the generator on the host, and waits until it has ended. Raises what it raises meanwhile."""

    async def aclose(self) -> None:
        """As `close`, in a coroutine."""
        import asyncio

        await asyncio.to_thread(self.close)

    def __iter__(self) -> Values[T_co]:
        return self

    def __aiter__(self) -> Values[T_co]:
        return self

    def __enter__(self) -> Values[T_co]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Packing(threading.local):
    """What was found in the call that this thread packs."""

    found: list[Any] | None = None


PACKING = _Packing()


def found_in_call(one: object) -> int:
    """Records a stream or handle in the arguments that are packed now; returns its number. Else raises NotPicklable."""
    found = PACKING.found
    if found is None:
        hint = "to map a method of an actor: [model.f.submit(x) for x in items]"
        raise NotPicklable(f"{one!r:.80} can only be an argument of a call", hint=hint)
    found.append(one)
    return len(found) - 1


class Stream(Generic[T]):
    """Values that are produced here, for a function that reads them on a host. `stream` makes it."""

    def __init__(self, values: Iterable[T], *, shard: bool) -> None:
        self.values = iter(values)
        self.shard = shard
        self.is_taken = False
        """A call reads it."""

    def __iter__(self) -> Iterator[T]:
        return self.values

    def __reduce__(self) -> tuple[Any, ...]:
        return context.argument, (found_in_call(self),)

    def __repr__(self) -> str:
        return "<stream>"


_NUMBERS: Final = itertools.count(1)
"""Of the objects that are offered: a handle that outlives one must not reach another."""


class Offered:
    """An object of this program as an argument of a call: a handle on the host, a `kind`, calls its methods here."""

    def __init__(self, made: object, kind: type[Any]) -> None:
        self.made, self._kind = made, kind
        self.name = f"offered.{next(_NUMBERS)}"

    def __reduce__(self) -> tuple[Any, ...]:
        found_in_call(self)
        return self._kind, (self.name, type(self.made).__qualname__)


def stream(values: Iterable[T], *, shard: bool = False) -> Stream[T]:
    """An argument that the function reads as an iterator, while `values` are produced here: ``f(sky.stream(it))``.

    In a broadcast every rank reads all values; with `shard` each value goes to one rank, in turn. An iterator for a
    parameter that is annotated ``Iterator[T]`` or ``Iterable[T]`` needs no `stream`. The function's iterator raises
    what `values` raises. When the function ends, `values` is closed if it is a generator.
    """
    return Stream(values, shard=shard)


def parameters(fn: Any) -> frozenset[int | str]:
    """The parameters that are annotated as iterators, by position and by name."""
    code, annotations = getattr(fn, "__code__", None), getattr(fn, "__annotations__", None)
    if code is None or not annotations:
        return frozenset()
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    found: set[int | str] = {name for name in names if _is_iterator(annotations.get(name))}
    return frozenset(found | {place for place, name in enumerate(names[: code.co_argcount]) if name in found})


def _is_iterator(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return _ANNOTATION.match(annotation) is not None
    return annotation in _KINDS or typing.get_origin(annotation) in _KINDS


def streamed(places: frozenset[int | str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The arguments, with iterators at these places as streams. Lists and other containers are sent as they are.

    An iterator at two places is one stream.
    """
    made: dict[int, Stream[Any]] = {}

    def as_stream(place: int | str, value: Any) -> Any:
        if place not in places or not isinstance(value, Iterator):
            return value
        return made.get(id(value)) or made.setdefault(id(value), stream(value))

    return (
        tuple(as_stream(place, value) for place, value in enumerate(args)),
        {name: as_stream(name, value) for name, value in kwargs.items()},
    )
