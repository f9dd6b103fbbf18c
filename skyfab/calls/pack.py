"""Pickles functions and arguments for sending.

A function is pickled again only if something that it refers to may have changed. It is named by the hash of its
content, so that a host is sent it once.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import linecache
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from skyfab._util.signals import is_from_handler
from skyfab.calls.call import BY_VALUE, Call, Function
from skyfab.calls.stream import PACKING, Stream, streamed
from skyfab.errors import NotPicklable, UsageError
from skyfab.protocol import codec, messages
from skyfab.protocol.blobs import name_of

T = TypeVar("T")

_ATOMS: Final = frozenset({int, float, complex, bool, str, bytes, type(None)})
_SOURCE: Final = 256 * 1024
NOTHING: Final = codec.dumps((None,))
"""The packed arguments of a call without any."""


@dataclass(frozen=True, slots=True)
class PackedFunction:
    """A pickled function, and the digest by which calls refer to it."""

    digest: str
    payload: codec.Payload


@dataclass(slots=True, kw_only=True)
class PackedCall:
    """A call as it is sent: packed once, whichever way it runs."""

    function: PackedFunction
    arguments: codec.Payload
    label: str
    tree: str = ""
    """The digest of the project's files that its worker imports."""
    timeout: float | None = None
    retries: int = 0
    stall: float | None = None
    yields: bool = False
    """It is a call of a generator function."""
    ahead: int = 0
    """How many of its values are sent before they are used."""
    gpus: float = 0
    """How many GPUs of one host it needs, or which share of one."""
    found: Sequence[Any] = ()
    """Streams and actors in its arguments, by their numbers."""
    same_gpus: bool = False
    """Arguments and result may refer to memory of a GPU."""

    @property
    def batch(self) -> int:
        """How many values one request is for, at most."""
        return max(1, self.ahead // 3) if self.yields else 0

    @property
    def converses(self) -> bool:
        """Whether values are exchanged with it while it runs."""
        return self.yields or (bool(self.found) and any(isinstance(one, Stream) for one in self.found))


def pack_function(function: Function[..., Any], plugins: tuple[Any, ...] = (), *, each: bool = True) -> PackedFunction:
    """The function, and plugins to enter before it is unpickled there, and around `each` call. Raises NotPicklable."""
    fn = function.fn
    state = _state(fn)
    if state is not None:
        known = function.packed
        if known is not None and known[0] == state and known[2] is plugins:
            return known[1]  # type: ignore[no-any-return]  # only this module sets it
    by_name = function.is_importable
    send_main_by_value()
    try:
        payload = codec.dumps(plugins, then=[(function if by_name else fn, by_name, sources_of(function), each)])
    except Exception as error:
        if is_from_handler(error) or isinstance(error, NotPicklable):
            raise
        raise NotPicklable(f"{function.label} cannot be pickled: {error}", hint=_culprit(fn)) from error
    packed = PackedFunction(_digest(payload), payload)
    if state is not None:
        function.packed = (state, packed, plugins)
    return packed


def pack_arguments(call: Call[Any], *, same_gpus: bool = False) -> codec.Payload:
    """The pickled arguments. Raises NotPicklable, naming the argument that cannot be pickled."""
    if not call.args and not call.kwargs:
        return NOTHING
    send_main_by_value()
    try:
        return codec.dumps((*call.args, call.kwargs or None), same_gpus=same_gpus)
    except Exception as error:
        if is_from_handler(error):
            raise
        for name, value in [*enumerate(call.args, 1), *call.kwargs.items()]:
            try:
                codec.dumps(value)
            except Exception as found:
                hint = "create it inside the function, or pass the data that it is made from"
                if isinstance(value, Iterator):
                    hint = "sky.stream(…) sends its values as they come, or annotate the parameter: Iterator[…]"
                raise NotPicklable(
                    f"argument {name!r} of {call.function.label}, a {type(value).__qualname__}, "
                    f"cannot be pickled: {found}",
                    hint=hint,
                ) from error
        raise NotPicklable(f"the arguments of {call.function.label} cannot be pickled: {error}") from error


def pack_streams(call: Call[Any], *, same_gpus: bool = False) -> tuple[codec.Payload, tuple[Any, ...]]:
    """The pickled arguments, and the streams and actors in them. Raises NotPicklable."""
    places = call.function.iterators
    if places:
        args, kwargs = streamed(places, call.args, call.kwargs)
        call = Call(call.function, args, kwargs)
    return collect(lambda: pack_arguments(call, same_gpus=same_gpus))


def collect(pack: Callable[[], T]) -> tuple[T, tuple[Any, ...]]:
    """What `pack` returns, and the streams and actors that it has pickled, by their numbers. Raises UsageError."""
    found: list[Any] = []
    PACKING.found = found
    try:
        packed = pack()
    finally:
        PACKING.found = None
    if any(isinstance(one, Stream) and one.is_taken for one in found):
        raise UsageError("an earlier call has read this stream", hint="create one for each call: f(sky.stream(…))")
    return packed, tuple(found)


def send_main_by_value() -> None:
    """Hosts cannot import the main module of a spawned child, which has a name of its own."""
    if (main := sys.modules.get("__mp_main__")) is not None:
        codec.send_by_value(main)


def _digest(payload: codec.Payload) -> str:
    """The digest of a pickled function. Buffers of a `Ref` have a digest already, which is used in their place."""
    names = payload.refs
    pieces = [names[id(buffer)].encode() if id(buffer) in names else buffer for buffer in payload.buffers]
    return name_of(payload.data, *pieces)


def _state(fn: Any) -> tuple[Any, ...] | None:
    """What the pickle of a function depends on, if comparing that is safe and cheap; else None.

    A function that uses mutable values returns None: it is pickled at every call.
    """
    if type(fn) is not types.FunctionType or fn.__dict__ or fn.__kwdefaults__:
        return None
    used: list[tuple[str, Any]] = []
    if fn.__defaults__:
        used += [("", value) for value in fn.__defaults__]
    if fn.__closure__:
        try:
            used += [("", cell.cell_contents) for cell in fn.__closure__]
        except ValueError:  # an empty cell
            return None
    names = _global_names(fn.__code__)
    if names:
        space = fn.__globals__
        used += [(name, space[name]) for name in names if name in space]
    found: list[Any] = [fn.__code__, fn.__module__]
    for name, value in used:
        if not _is_atom(value):
            return None
        # Equality is not enough: True == 1, and 0.0 == -0.0.
        found.append((name, type(value), repr(value) if type(value) in (float, complex) else value))
    return tuple(found)


def _is_atom(value: Any) -> bool:
    """It is immutable, or a module or builtin function that a host imports by name."""
    if type(value) is types.ModuleType:
        return sys.modules.get(value.__name__) is value
    if type(value) is types.BuiltinFunctionType:
        return value.__self__ is None or type(value.__self__) is types.ModuleType
    return type(value) in _ATOMS


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    inner = [_global_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return tuple(dict.fromkeys(itertools.chain(code.co_names, *inner)))


def sources_of(made: Any) -> dict[str, str]:
    """The source file of a function or class that is pickled by value, for its tracebacks on the host."""
    parts: Iterable[Any] = [made]
    if isinstance(made, Function):
        parts = () if made.is_importable else [made.fn]
    elif isinstance(made, type):
        parts = vars(made).values() if made.__module__ in BY_VALUE or "<locals>" in made.__qualname__ else ()
    code = next((part.__code__ for part in parts if hasattr(part, "__code__")), None)
    if code is None:
        return {}
    text = "".join(linecache.getlines(code.co_filename))
    return {code.co_filename: text} if 0 < len(text) < _SOURCE else {}


def _culprit(fn: Any) -> str | None:
    """A hint about which of the values that a function uses cannot be pickled."""
    code = getattr(fn, "__code__", None)
    if code is None:
        return None
    used = {name: fn.__globals__[name] for name in _global_names(code) if name in fn.__globals__}
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # an empty cell
            used[name] = cell.cell_contents
    names = code.co_varnames[: code.co_argcount]
    used |= dict(zip(reversed(names), reversed(fn.__defaults__ or ()), strict=False)) | (fn.__kwdefaults__ or {})
    for name, value in used.items():
        if isinstance(value, types.ModuleType):
            continue
        try:
            codec.dumps(value)
        except Exception:
            return f"it uses {name!r}, a {type(value).__qualname__}: create it inside the function"
    return None


def parts_of(payload: codec.Payload, names: Mapping[int, str]) -> tuple[tuple[messages.Part, ...], Sequence[Any]]:
    """Splits a payload into references to blobs in the store, by name, and inline buffers."""
    if not names:
        return payload.parts, (payload.data, *payload.buffers)
    parts: list[messages.Part] = [len(payload.data)]
    inline: list[Any] = [payload.data]
    for buffer, part in zip(payload.buffers, payload.parts[1:], strict=True):
        name = names.get(id(buffer))
        if name is None:
            parts.append(part)
            inline.append(buffer)
        elif payload.kinds.get(id(buffer)) == "bytes":
            parts.append((name, len(buffer), "bytes"))
        else:
            parts.append((name, len(buffer)))
    return tuple(parts), inline
