"""Results of a broadcast whose large parts are sent once: ranks name them, and only the head sends what all have."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from skyfab import context
from skyfab.protocol import codec
from skyfab.protocol.blobs import LARGE, name_of

_kept: dict[str, memoryview] = {}
"""The large parts of this rank's result, until the client has what it lacks."""

Named = tuple[bytes, list[str], list[Any]]
"""A pickled result, the names of its buffers (empty for small ones), and those that come with it."""


class Naming:
    """A function that returns its results by name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Named:
        global _kept
        payload = codec.dumps(context.awaited(self._function(*args, **kwargs)))
        names = [name_of(part) if len(part) >= LARGE else "" for part in payload.buffers]
        _kept = {name: part for name, part in zip(names, payload.buffers, strict=True) if name}
        is_head = context.instance_info().is_head
        sent = [
            pickle.PickleBuffer(part) for name, part in zip(names, payload.buffers, strict=True) if is_head or not name
        ]
        return payload.data, names, sent


def take_kept(wanted: Sequence[Sequence[str]]) -> list[Any]:
    """The parts that the client wants of each rank. This rank forgets all of them. Raises RuntimeError."""
    global _kept
    found, _kept = _kept, {}
    names = wanted[context.instance_info().rank]
    if not found.keys() >= set(names):
        raise RuntimeError("the process that had the result has ended")
    return [pickle.PickleBuffer(found[name]) for name in names]


def assembled(results: Sequence[Named], fetch: Callable[[list[list[str]]], Sequence[Sequence[Any]]]) -> list[Any]:
    """The results of all ranks. `fetch` is called with what each of them has and the head has not."""
    (_, heads, parts), *_ = results
    common = {name: part for name, part in zip(heads, parts, strict=True) if name}
    wanted = [[name for name in dict.fromkeys(names) if name and name not in common] for _, names, _ in results]
    fetched = fetch(wanted)
    found = []
    for rank, (data, names, sent) in enumerate(results):
        own = dict(zip(wanted[rank], fetched[rank], strict=True))
        small = iter(sent)
        buffers = (
            parts
            if not rank
            else [own[name] if name in own else bytearray(common[name]) if name else next(small) for name in names]
        )
        found.append(codec.loads(data, buffers))
    return found
