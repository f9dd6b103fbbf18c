"""Plain data: what may come back from a host that is not trusted, unpickled without importing or calling anything else.

A pickle is a program. Here only the steps that make data are known, a name in it is looked up in a table and never
imported, and what the table has are makers of our own that check what they are given. What comes out is looked
through once more. A host can still send nonsense, or much of it; it cannot run anything here.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import io
import pathlib
import pickle
import re
import struct
import sys
import types
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NoReturn

from skyfab.protocol.streams import Buffer

_KEY: Final = 4096
"""Things that a key consists of: a small pickle can name a tuple whose hash takes for ever."""
_BITS: Final = 65536
"""Of a fraction's numbers: reducing it takes the square of that."""
_ATTRIBUTES: Final = {"__notes__", "name", "path"}
"""What an exception keeps besides its arguments."""


def loads(data: Buffer, buffers: Sequence[memoryview] = ()) -> Any:
    """The object, if it is plain data, numpy's or torch's.

    Raises `pickle.UnpicklingError`, which names what is something else, or whatever a damaged pickle raises.
    """
    return _survey(_Unpickler(data, buffers).load())


def loads_exception(data: Buffer, buffers: Sequence[memoryview] = ()) -> Exception:
    """The exception, if it is one of Python's own, made of plain data. Raises as `loads` does."""
    found = _Unpickler(data, buffers, exceptions=True).load()
    if not isinstance(found, Exception):
        refuse(type(found))
    _survey(found.args)
    return found


def refuse(what: object) -> NoReturn:
    """Raises UnpicklingError for a type, or for something that a text describes."""
    text = f"{what.__module__}.{what.__qualname__}" if isinstance(what, type) else str(what)
    raise pickle.UnpicklingError(ascii(text)[1:-1][:200])


class _Maker:
    """Stands for a name of the pickle: what is called in its place."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make


class _Draft:
    """An object whose state follows; it is made when that is there."""

    __slots__ = ("finish", "place")

    def __init__(self, finish: Callable[[Any], Any]) -> None:
        self.finish = finish
        self.place = -1


# ---- plain data


def _fraction(*parts: Any) -> fractions.Fraction:
    for part in parts:
        if type(part) is str and re.fullmatch(r"-?\d{1,4000}(/\d{1,4000})?", part):  # as Python 3.10 pickles it
            continue
        if type(part) is not int or part.bit_length() > _BITS:
            refuse("an odd Fraction")
    return fractions.Fraction(*parts)


def _only(kind: Callable[..., Any], *types: type) -> Callable[..., Any]:
    """Calls `kind` with arguments of these types alone."""

    def make(*given: Any) -> Any:
        if any(type(one) not in types for one in given):
            refuse(f"an odd {getattr(kind, '__name__', kind)}")
        return kind(*given)

    return make


def _empty(kind: Callable[..., Any]) -> Callable[..., Any]:
    """Makes an empty container: what is in it follows."""
    return lambda: kind()


def _deque(first: tuple[()] = (), most: int | None = None) -> collections.deque[Any]:
    if first != () or type(most) not in (int, type(None)):
        refuse("an odd deque")
    return collections.deque((), most)


def _uuid() -> _Draft:
    def finish(state: Any) -> uuid.UUID:
        found = uuid.UUID(int=state["int"])
        if "is_safe" in state:
            object.__setattr__(found, "is_safe", uuid.SafeUUID(state["is_safe"]))
        return found

    return _Draft(finish)


# ---- numpy: its own functions trust what they are given


def _dtype(name: str, align: bool = False, copy: bool = True) -> _Draft:
    if type(name) is not str or not re.fullmatch(r"b1|[iufcSUV]\d{1,9}|[mM]8", name):
        refuse(f"a numpy dtype {name!r}")
    return _Draft(lambda state: _dtype_of(name, *state))


def _dtype_of(name: str, version: int, order: str, sub: Any, names: Any, fields: Any, *rest: Any) -> Any:
    import numpy as np

    if order not in ("<", ">", "|", "="):
        refuse("an odd numpy dtype")
    size, align, flags, *more = rest
    if sub is not None:
        base, shape = sub
        dtype = np.dtype((_is(base, np.dtype), _shape(shape) if type(shape) is tuple else shape))
    elif names is not None:
        formats = [_is(fields[one][0], np.dtype) for one in names]
        offsets = [fields[one][1] for one in names]
        layout = {"names": list(names), "formats": formats, "offsets": offsets, "itemsize": size}
        dtype = np.dtype(layout, align=bool(flags & 0x80))
    elif more and more[0] is not None and name in ("m8", "M8"):
        unit, number, *_ = more[0][1]
        text = unit.decode("ascii") if type(unit) is bytes else ""
        if not re.fullmatch(r"[a-zA-Z]{1,7}", text) or type(number) is not int:
            refuse("an odd numpy dtype")
        dtype = np.dtype(name if text == "generic" else f"{name}[{number}{text}]").newbyteorder(order)
    else:
        dtype = np.dtype(name).newbyteorder(order)
    if dtype.hasobject or not dtype.itemsize:
        refuse(f"a numpy dtype {dtype}")
    return dtype


def _is(value: Any, kind: type) -> Any:
    return value if isinstance(value, kind) else refuse(type(value))


def _shape(given: Any, most: int = 64) -> tuple[int, ...]:
    if type(given) is not tuple or len(given) > most or any(type(one) is not int or one < 0 for one in given):
        refuse("an odd shape")
    shape: tuple[int, ...] = given
    return shape


def _array(memory: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> Any:
    """An array in the memory that came: never a larger one."""
    import numpy as np

    _is(dtype, np.dtype)
    count = dtype.itemsize
    for one in _shape(shape):
        count *= one
    if type(memory) not in (bytes, bytearray, memoryview) or memoryview(memory).nbytes != count:
        refuse("an array of another size than its memory")
    if order == "K":
        straight = np.ndarray(shape, dtype, memory)
        return straight.transpose(_shape(axes))
    return np.ndarray(shape, dtype, memory, order="F" if order == "F" else "C")


def _reconstruct(kind: Any, shape: Any, code: Any) -> _Draft:
    if kind is not _NDARRAY:
        refuse("a subclass of numpy.ndarray")

    def finish(state: Any) -> Any:
        _, shape, dtype, fortran, content = state
        return _array(bytearray(_is(content, bytes)), dtype, shape, "F" if fortran is True else "C")

    return _Draft(finish)


def _scalar(dtype: Any, content: Any) -> Any:
    return _array(_is(content, bytes), dtype, (), "C")[()]


_NDARRAY: Final = _Maker(lambda *_: refuse("numpy.ndarray"))


# ---- torch, as our codec packs it


def _storage(memory: Any, device: Any) -> Any:
    from skyfab.protocol import codec

    if type(memory) not in (bytes, bytearray, memoryview):
        refuse(type(memory))
    view = memoryview(memory)
    where = device if type(device) is str and re.fullmatch(r"cuda(:\d{1,3})?", device) else "cpu"
    return codec._storage(bytearray(view) if view.readonly else view, where)


def _typed(untyped: Any, dtype: Any) -> Any:
    import torch

    from skyfab.protocol import codec

    return codec._typed(_is(untyped, torch.UntypedStorage), _is(dtype, torch.dtype))


def _same(untyped: Any) -> Any:
    import torch

    return _is(untyped, torch.UntypedStorage)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, meta: Any = None) -> Any:
    """A tensor within its storage: torch itself would not look."""
    import torch

    _is(storage, torch.storage.TypedStorage)
    (start,), last, count = _shape((offset,)), 0, 1
    for extent, step in zip(_shape(size), _shape(stride), strict=True):
        last += (extent - 1) * step
        count *= extent
    room = storage._untyped_storage.nbytes() // storage.dtype.itemsize
    if hooks or meta or start > room or count > room or (count and start + last >= room):
        refuse("a tensor that is more than its memory")
    return torch._utils._rebuild_tensor_v2(storage, start, size, stride, grad is True, collections.OrderedDict())


def _tensor_of_bytes(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *rest: Any
) -> Any:
    """One of a type that has no typed storage of its own."""
    import torch

    from skyfab.protocol import codec

    checked = _tensor(_typed(storage, dtype), offset, size, stride, grad, hooks, *rest)
    made = codec._rebuild_v3(storage, offset, size, stride, checked.requires_grad, collections.OrderedDict(), dtype)
    return _is(made, torch.Tensor)


def _parameter(tensor: Any, grad: Any, hooks: Any) -> Any:
    import torch

    if type(tensor) is not torch.Tensor or hooks:
        refuse("an odd Parameter")
    return torch.nn.Parameter(tensor, requires_grad=grad is True)


def _size(given: Any) -> Any:
    import torch

    return torch.Size(_shape(given))


_REBUILD_V3: Final = _Maker(_tensor_of_bytes)
_MAKERS: Final = types.MappingProxyType(
    {
        "builtins.complex": _Maker(_only(complex, float)),
        "builtins.range": _Maker(_only(range, int)),
        "builtins.slice": _Maker(slice),
        "collections.OrderedDict": _Maker(_empty(collections.OrderedDict)),
        "collections.defaultdict": _Maker(_empty(collections.defaultdict)),
        "collections.deque": _Maker(_deque),
        "datetime.date": _Maker(_only(datetime.date, bytes)),
        "datetime.datetime": _Maker(_only(datetime.datetime, bytes, datetime.timezone)),
        "datetime.time": _Maker(_only(datetime.time, bytes, datetime.timezone)),
        "datetime.timedelta": _Maker(_only(datetime.timedelta, int)),
        "datetime.timezone": _Maker(_only(datetime.timezone, datetime.timedelta, str)),
        "decimal.Decimal": _Maker(_only(decimal.Decimal, str)),
        "fractions.Fraction": _Maker(_fraction),
        "pathlib.PosixPath": _Maker(_only(pathlib.Path, str)),
        "pathlib.PurePosixPath": _Maker(_only(pathlib.PurePosixPath, str)),
        "pathlib.PureWindowsPath": _Maker(_only(pathlib.PureWindowsPath, str)),
        "uuid.UUID": _Maker(_uuid),
        "numpy.dtype": _Maker(_dtype),
        "numpy.ndarray": _NDARRAY,
        "numpy.core.multiarray._reconstruct": _Maker(_reconstruct),
        "numpy.core.multiarray.scalar": _Maker(_scalar),
        "numpy.core.numeric._frombuffer": _Maker(_array),
        "torch.Size": _Maker(_size),
        "torch._utils._rebuild_parameter": _Maker(_parameter),
        "torch._utils._rebuild_tensor_v2": _Maker(_tensor),
        "skyfab.protocol.codec._rebuilder": _Maker(lambda: _REBUILD_V3),
        "skyfab.protocol.codec._same": _Maker(_same),
        "skyfab.protocol.codec._storage": _Maker(_storage),
        "skyfab.protocol.codec._typed": _Maker(_typed),
    }
)
"""Every name that a pickle may use, but for torch's dtypes and, in an exception, Python's own exceptions."""


def _find(name: str, exceptions: bool) -> Any:
    name = name.replace("numpy._core.", "numpy.core.", 1).replace("pathlib._local.", "pathlib.", 1)
    if name in _MAKERS:
        return _MAKERS[name]
    if re.fullmatch(r"torch\.(bool|bfloat16|(complex|float|u?int)\d\w{0,16})", name):
        import torch

        return _is(getattr(torch, name[6:], None), torch.dtype)
    kind = vars(builtins).get(name[9:]) if name.startswith("builtins.") else None
    if exceptions and isinstance(kind, type) and issubclass(kind, Exception) and not hasattr(kind, "derive"):
        return _Maker(kind)
    return refuse(name)


# ---- the unpickler


class _Unpickler(pickle._Unpickler):  # type: ignore[misc,name-defined]
    """Python's own, in Python: the one in C makes room for whatever a pickle announces."""

    def __init__(self, data: Buffer, buffers: Iterable[memoryview], *, exceptions: bool = False) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._exceptions = exceptions

    def _global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            refuse("a name that is none")
        self.append(_find(f"{module}.{name}", self._exceptions))

    def _call(self) -> None:
        arguments, maker = self.stack.pop(), self.stack[-1]
        if type(maker) is not _Maker or type(arguments) is not tuple:
            refuse("a call of what cannot be called")
        self.stack[-1] = maker.make(*arguments)

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is _Draft:
            self.stack[-1] = target.finish(state)
            if target.place >= 0:
                self.memo[target.place] = self.stack[-1]
        elif type(target) is collections.OrderedDict and type(state) is dict and [*state] == ["_metadata"]:
            target._metadata = state["_metadata"]  # type: ignore[attr-defined]  # a state_dict's
        elif self._exceptions and isinstance(target, Exception) and type(state) is dict:
            for name in _ATTRIBUTES & state.keys():
                setattr(target, name, _survey(state[name]))
        else:
            refuse(f"attributes of a {type(target).__name__}")

    def _memoize(self) -> None:
        if type(self.stack[-1]) is _Draft:
            self.stack[-1].place = len(self.memo)
        self.memo[len(self.memo)] = self.stack[-1]

    def _bytearray(self) -> None:
        (size,) = struct.unpack("<Q", self.read(8))
        content = self.read(min(size, sys.maxsize))
        if len(content) != size:
            refuse("less than it says")
        self.append(bytearray(content))

    def _into(self, *kinds: type) -> Any:
        """The container on top of the stack."""
        return self.stack[-1] if type(self.stack[-1]) in kinds else refuse("content of what contains nothing")

    def _extend(self) -> None:
        items = self.pop_mark()
        self._into(list, collections.deque).extend(items)

    def _append(self) -> None:
        item = self.stack.pop()
        self._into(list, collections.deque).append(item)

    def _update(self) -> None:
        items = self.pop_mark()
        target = self._into(dict, collections.OrderedDict, collections.defaultdict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_key(key)] = value

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._into(dict, collections.OrderedDict, collections.defaultdict)[_key(key)] = value

    def _add(self) -> None:
        items = self.pop_mark()
        self._into(set).update(map(_key, items))

    def _frozenset(self) -> None:
        self.append(frozenset(map(_key, self.pop_mark())))

    dispatch = {  # noqa: RUF012  # as in its base: what is not here is not known
        **{
            getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]]  # type: ignore[attr-defined]
            for name in (
                "PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT"
                " SHORT_BINBYTES BINBYTES BINBYTES8 SHORT_BINUNICODE BINUNICODE BINUNICODE8 EMPTY_TUPLE TUPLE TUPLE1"
                " TUPLE2 TUPLE3 EMPTY_LIST EMPTY_DICT EMPTY_SET BINGET LONG_BINGET NEXT_BUFFER READONLY_BUFFER"
            ).split()
        },
        pickle.STACK_GLOBAL[0]: _global,
        pickle.REDUCE[0]: _call,
        pickle.NEWOBJ[0]: _call,
        pickle.BUILD[0]: _build,
        pickle.MEMOIZE[0]: _memoize,
        pickle.BYTEARRAY8[0]: _bytearray,
        pickle.APPEND[0]: _append,
        pickle.APPENDS[0]: _extend,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _update,
        pickle.ADDITEMS[0]: _add,
        pickle.FROZENSET[0]: _frozenset,
    }


# ---- what came out

_ATOMS: Final = (
    *(type(None), bool, int, float, complex, str, bytes, range, datetime.date, datetime.datetime, datetime.time),
    *(datetime.timedelta, datetime.timezone, decimal.Decimal, fractions.Fraction, uuid.UUID),
    *(pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path())),
)
_LEAVES: Final = frozenset((*_ATOMS, bytearray))
_ROWS: Final = (list, tuple, set, frozenset, collections.deque)
_TABLES: Final = (dict, collections.OrderedDict, collections.defaultdict)


def _key(key: Any) -> Any:
    """A key, or a member of a set, that is quickly hashed and compared."""
    if type(key) in (str, int):
        return key
    todo, left = [key], _KEY
    while todo:
        one = todo.pop()
        left -= 1
        if type(one) in (tuple, frozenset) and len(one) <= left:
            todo += one
        elif left < 0 or not (type(one) in _ATOMS or _is_number(type(one))):
            refuse(f"a {type(one).__name__} as a key")
    return key


def _is_number(kind: type) -> bool:
    np = sys.modules.get("numpy")
    return np is not None and issubclass(kind, (np.number, np.bool_, np.character))


def _survey(root: Any) -> Any:
    """The object, once it is certain that there is nothing but data in it."""
    seen: set[int] = set()
    todo = [root]
    while todo:
        one = todo.pop()
        kind = type(one)
        if kind in _LEAVES or id(one) in seen:
            continue
        seen.add(id(one))
        if kind in _ROWS:
            todo.extend(one)
        elif kind in _TABLES:
            todo.extend(one.keys())
            todo.extend(one.values())
            todo.append(getattr(one, "_metadata", None))
        elif kind is slice:
            todo.extend((one.start, one.stop, one.step))
        elif not _is_array(kind):
            refuse("a class or function" if kind in (_Maker, _Draft) else kind)
    return root


def _is_array(kind: type) -> bool:
    np, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if np is not None and (kind is np.ndarray or issubclass(kind, (np.generic, np.dtype))):
        return True
    return torch is not None and (
        kind in (torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.UntypedStorage)
        or kind is torch.storage.TypedStorage
    )
