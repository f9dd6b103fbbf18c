"""The constructors that `safe_pickle` allows, by name. Each checks its arguments, because they are untrusted.

A pickle can cause no import except of numpy and torch, and none of their functions that trust their arguments is
called: arrays and tensors are created in the received memory, and are never larger than it.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import pathlib
import pickle
import re
import sys
import types
import uuid
from collections.abc import Callable
from typing import Any, Final, NoReturn

from skyfab.protocol import codec

_BITS: Final = 65536
"""Maximum bits of a fraction's numerator and denominator: reducing it takes quadratic time."""


class Maker:
    """The function that is called for a name in the pickle."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make


class Draft:
    """An object whose state follows in the pickle; it is created from that state."""

    __slots__ = ("finish", "place")

    def __init__(self, finish: Callable[[Any], Any]) -> None:
        self.finish = finish
        self.place = -1
        """Its index in the unpickler's memo."""


def find(name: str) -> Any:
    """What a name in the pickle refers to. Raises UnpicklingError for names that are not allowed."""
    name = name.replace("numpy._core.", "numpy.core.", 1).replace("pathlib._local.", "pathlib.", 1)
    if name in _MAKERS:
        return _MAKERS[name]
    if re.fullmatch(r"torch\.(bool|bfloat16|(complex|float|u?int)\d\w{0,16})", name):
        import torch

        return _is(getattr(torch, name[6:], None), torch.dtype)
    return refuse(name)


def find_exception(name: str) -> type[Exception] | None:
    """The built-in exception type of this name, if its constructor only stores its arguments; else None.

    Exception groups contain other exceptions, and a SyntaxError copies any iterable.
    """
    kind = vars(builtins).get(name[9:]) if name.startswith("builtins.") else None
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, SyntaxError):
        return None if hasattr(kind, "derive") else kind
    return None


def refuse(what: object) -> NoReturn:
    """Raises UnpicklingError with the name of a type, or with the given text."""
    text = f"{what.__module__}.{what.__qualname__}" if isinstance(what, type) else str(what)
    raise pickle.UnpicklingError(ascii(text)[1:-1][:200])


def _is(value: Any, kind: type) -> Any:
    return value if isinstance(value, kind) else refuse(type(value))


# ---- plain data


def _only(kind: Callable[..., Any], *types: type) -> Maker:
    """A Maker that calls `kind`, and refuses arguments of other types than these."""

    def make(*given: Any) -> Any:
        if any(type(one) not in types for one in given):
            refuse(f"an odd {getattr(kind, '__name__', kind)}")
        return kind(*given)

    return Maker(make)


def _fraction(*parts: Any) -> fractions.Fraction:
    for part in parts:
        if type(part) is str and re.fullmatch(r"-?\d{1,4000}(/\d{1,4000})?", part):  # the form that Python 3.10 pickles
            continue
        if type(part) is not int or part.bit_length() > _BITS:
            refuse("an odd Fraction")
    return fractions.Fraction(*parts)


def _slice(*parts: Any) -> slice:
    """A slice of plain values. Slices of slices are refused: they are deallocated recursively, at any depth."""
    np = sys.modules.get("numpy")
    for part in parts:
        if type(part) not in (int, float, str, type(None)) and not (np and isinstance(part, np.generic)):
            refuse("an odd slice")
    return slice(*parts)


def _deque(first: object = (), most: Any = None) -> collections.deque[Any]:
    if first != () or type(most) not in (int, type(None)):
        refuse("an odd deque")
    return collections.deque(maxlen=most)


def _uuid() -> Draft:
    def finish(state: Any) -> uuid.UUID:
        found = uuid.UUID(int=_is(state["int"], int))
        if "is_safe" in state:
            object.__setattr__(found, "is_safe", uuid.SafeUUID(state["is_safe"]))
        return found

    return Draft(finish)


# ---- numpy


def _dtype(name: Any, *_: object) -> Draft:
    if type(name) is not str or not re.fullmatch(r"b1|[iufcSUV]\d{1,9}|[mM]8", name):
        refuse(f"a numpy dtype {name!r:.50}")
    return Draft(lambda state: _dtype_of(name, *state))


def _dtype_of(name: str, _version: int, order: Any, sub: Any, names: Any, fields: Any, *rest: Any) -> Any:
    import numpy as np

    size, _, flags, *more = rest
    if sub is not None:
        base, shape = sub
        dtype = np.dtype((_is(base, np.dtype), _shape(shape)))
    elif names is not None:
        dtype = np.dtype(_layout(names, fields, size), align=bool(flags & 0x80))
    elif name in ("m8", "M8") and more:
        dtype = np.dtype(name + _unit(*more[0][1])).newbyteorder(_is(order, str))
    else:
        dtype = np.dtype(name).newbyteorder(_is(order, str))
    if dtype.hasobject or not dtype.itemsize:
        refuse(f"a numpy dtype {dtype!s:.50}")
    return dtype


def _layout(names: Any, fields: Any, size: Any) -> dict[str, Any]:
    import numpy as np

    formats = [_is(fields[one][0], np.dtype) for one in _is(names, tuple)]
    return {
        "names": [_is(one, str) for one in names],
        "formats": formats,
        "offsets": [_is(fields[one][1], int) for one in names],
        "itemsize": _is(size, int),
    }


def _unit(unit: Any, number: Any, *_: object) -> str:
    text = _is(unit, bytes).decode("ascii")
    if not re.fullmatch(r"[a-zA-Z]{1,2}|generic", text):
        refuse("a numpy dtype of an odd unit")
    return "" if text == "generic" else f"[{_is(number, int)}{text}]"


def _shape(given: Any) -> tuple[int, ...]:
    if type(given) is not tuple or len(given) > 64 or any(type(one) is not int or one < 0 for one in given):
        refuse("an odd shape")
    shape: tuple[int, ...] = given
    return shape


def _array(memory: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> Any:
    """An array that uses exactly the received memory."""
    import numpy as np

    count = _is(dtype, np.dtype).itemsize
    for one in _shape(shape):
        count *= one
    if _memory(memory).nbytes != count:
        refuse("an array of another size than its memory")
    if order == "K":
        return np.ndarray(shape, dtype, memory).transpose(_shape(axes))
    return np.ndarray(shape, dtype, memory, order="F" if order == "F" else "C")


def _memory(given: Any) -> memoryview:
    return memoryview(given) if type(given) in (bytes, bytearray, memoryview) else refuse(type(given))


def _reconstruct(kind: Any, *_: object) -> Draft:
    if kind is not _NDARRAY:
        refuse("a subclass of numpy.ndarray")

    def finish(state: Any) -> Any:
        _, shape, dtype, fortran, content = state
        if type(content) is not bytes:
            refuse("a numpy array of objects")
        return _array(bytearray(content), dtype, shape, "F" if fortran is True else "C")

    return Draft(finish)


def _scalar(dtype: Any, content: Any) -> Any:
    return _array(_is(content, bytes), dtype, (), "C")[()]


_NDARRAY: Final = Maker(lambda *_: refuse("numpy.ndarray"))


# ---- torch, as `codec` pickles it


def _storage(memory: Any, device: Any) -> Any:
    view = _memory(memory)
    where = device if type(device) is str and re.fullmatch(r"cuda(:\d{1,3})?", device) else "cpu"
    # Torch does not lock a bytearray against resizing: another reference to it could free the tensor's memory. So copy.
    ours = view if type(memory) is memoryview and not view.readonly else bytearray(view)
    return codec._storage(ours, where)


def _same(untyped: Any) -> Any:
    import torch

    return _is(untyped, torch.UntypedStorage)


def _typed(untyped: Any, dtype: Any) -> Any:
    import torch

    return codec._typed(_same(untyped), _is(dtype, torch.dtype))


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, meta: Any = None) -> Any:
    import torch

    _is(storage, torch.storage.TypedStorage)
    _check_extent(storage._untyped_storage, storage.dtype, offset, size, stride)
    if hooks or meta:
        refuse("a tensor with hooks")
    return torch._utils._rebuild_tensor_v2(storage, offset, size, stride, grad is True, collections.OrderedDict())


def _tensor_of_bytes(
    untyped: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, meta: Any = None
) -> Any:
    """A tensor of a dtype that has no typed storage."""
    import torch

    _check_extent(_same(untyped), _is(dtype, torch.dtype), offset, size, stride)
    if hooks or meta:
        refuse("a tensor with hooks")
    return codec._rebuild_v3(untyped, offset, size, stride, grad is True, collections.OrderedDict(), dtype)


def _check_extent(untyped: Any, dtype: Any, offset: Any, size: Any, stride: Any) -> None:
    """Refuses a tensor that exceeds its storage or has more elements: torch might enlarge the storage, or not check."""
    (last,), count = _shape((offset,)), 1
    for extent, step in zip(_shape(size), _shape(stride), strict=True):
        last += (extent - 1) * step
        count *= extent
    room = untyped.nbytes() // dtype.itemsize
    if count > room or offset > room or (count and last >= room):
        refuse("a tensor larger than its memory (contiguous() makes one that is not)")


def _parameter(tensor: Any, grad: Any, hooks: Any) -> Any:
    import torch

    if type(tensor) is not torch.Tensor or hooks:
        refuse("an odd Parameter")
    return torch.nn.Parameter(tensor, requires_grad=grad is True)


def _size(given: Any) -> Any:
    import torch

    return torch.Size(_shape(given))


_TENSOR_OF_BYTES: Final = Maker(_tensor_of_bytes)
_MAKERS: Final = types.MappingProxyType(
    {
        "builtins.complex": _only(complex, float),
        "builtins.range": _only(range, int),
        "builtins.slice": Maker(_slice),
        "collections.OrderedDict": _only(collections.OrderedDict),
        "collections.defaultdict": _only(collections.defaultdict),
        "collections.deque": Maker(_deque),
        "datetime.date": _only(datetime.date, bytes),
        "datetime.datetime": _only(datetime.datetime, bytes, datetime.timezone),
        "datetime.time": _only(datetime.time, bytes, datetime.timezone),
        "datetime.timedelta": _only(datetime.timedelta, int),
        "datetime.timezone": _only(datetime.timezone, datetime.timedelta, str),
        "decimal.Decimal": _only(decimal.Decimal, str),
        "fractions.Fraction": Maker(_fraction),
        "pathlib.PosixPath": _only(pathlib.Path, str),
        "pathlib.PurePosixPath": _only(pathlib.PurePosixPath, str),
        "pathlib.PureWindowsPath": _only(pathlib.PureWindowsPath, str),
        "uuid.UUID": Maker(_uuid),
        "numpy.dtype": Maker(_dtype),
        "numpy.ndarray": _NDARRAY,
        "numpy.core.multiarray._reconstruct": Maker(_reconstruct),
        "numpy.core.multiarray.scalar": Maker(_scalar),
        "numpy.core.numeric._frombuffer": Maker(_array),
        "torch.Size": Maker(_size),
        "torch._utils._rebuild_parameter": Maker(_parameter),
        "torch._utils._rebuild_tensor_v2": Maker(_tensor),
        "skyfab.protocol.codec._rebuilder": _only(lambda: _TENSOR_OF_BYTES),
        "skyfab.protocol.codec._same": Maker(_same),
        "skyfab.protocol.codec._storage": Maker(_storage),
        "skyfab.protocol.codec._typed": Maker(_typed),
    }
)
"""Every name that a pickle may use, except torch's dtypes."""
