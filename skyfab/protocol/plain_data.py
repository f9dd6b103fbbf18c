"""Plain data as JSON and raw buffers: how results of hosts that are not trusted are encoded. Nothing is unpickled.

None, bool, int, float and str are what they are in JSON. Anything else is a list: the name of its type, and the values
that it is made of, in the same form. The last value of bytes, arrays and tensors is the number of a buffer, or base64
instead of a small one. An object that is referred to twice is decoded as two objects.
"""

from __future__ import annotations

import base64
import builtins
import collections
import datetime
import decimal
import fractions
import itertools
import json
import math
import pathlib
import re
import sys
import uuid
from operator import attrgetter

from skyfab.protocol import codec

TYPE_CHECKING = False  # see frames.py
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any, Final, NoReturn

    from skyfab.protocol.frames import Buffer

_DEEPEST: Final = 200
"""How deep containers may be nested: so deep that no Python fails at encoding, decoding, printing or deleting them."""
_BITS: Final = 65536
"""Maximum bits of a fraction's numerator and denominator: reducing it takes quadratic time."""
_MANY: Final = 1000
"""Number of keys from which on their hashes are checked."""
_ALIKE: Final = 100
"""Number of keys that may have the same hash."""
_JSON: Final = frozenset({type(None), bool, int, float, str})
_ATTRIBUTES: Final = ("__notes__", "name", "path")
"""The attributes that an exception keeps in addition to its arguments."""


class NotPlain(Exception):
    """The type that is not plain data, or what is wrong with data from a host."""


def dumps(value: Any) -> codec.Payload:
    """Encodes plain data, numpy arrays and torch tensors. Raises NotPlain."""
    encoder = _Encoder()
    document = json.dumps(encoder.encode(value, 0), separators=(",", ":"))
    return codec.Payload(document.encode("ascii"), encoder.buffers)


def loads(data: Buffer, buffers: Sequence[memoryview] = ()) -> Any:
    """Decodes what `dumps` has encoded. Arrays and tensors use the memory of the buffers. Raises NotPlain."""
    try:
        return _Decoder(buffers).decode(json.loads(bytes(data).decode("ascii")), 0)
    except NotPlain:
        raise
    except Exception as error:  # constructors, numpy and torch refuse odd values in many ways
        raise NotPlain(f"{type(error).__name__}: {ascii(str(error))[1:-1][:200]}") from error


def dumps_exception(error: Exception) -> codec.Payload:
    """Encodes one of Python's own exceptions. Raises NotPlain for others."""
    kind = type(error)
    if _exception_type(kind.__name__) is not kind:
        _refuse(kind)
    reduced: Any = error.__reduce__()  # its type, its arguments, and its attributes if it has any
    attributes = reduced[2] if len(reduced) > 2 else {}
    kept = {name: value for name, value in attributes.items() if name in _ATTRIBUTES}
    return dumps((kind.__name__, reduced[1], kept))


def loads_exception(data: Buffer, buffers: Sequence[memoryview] = ()) -> Exception:
    """Decodes what `dumps_exception` has encoded. Raises NotPlain."""
    try:
        name, args, kept = loads(data, buffers)
        kind = _exception_type(_is(name, str))
        if kind is None:
            _refuse(name)
        error = kind(*_is(args, tuple))
        for attribute in _ATTRIBUTES:
            if attribute in _is(kept, dict):
                setattr(error, attribute, kept[attribute])
        return error
    except (TypeError, ValueError) as error:
        raise NotPlain("not an exception") from error


def _exception_type(name: str) -> type[Exception] | None:
    """The built-in exception type of this name, if its constructor only stores its arguments; else None.

    Exception groups contain other exceptions, and a SyntaxError copies any iterable.
    """
    kind = vars(builtins).get(name)
    if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(kind, SyntaxError):
        return None
    return None if hasattr(kind, "derive") else kind


def _refuse(what: object) -> NoReturn:
    """Raises NotPlain with the name of a type, or with the given text."""
    text = f"{what.__module__}.{what.__qualname__}" if isinstance(what, type) else str(what)
    raise NotPlain(ascii(text)[1:-1][:200])


def _is(value: Any, kind: type) -> Any:
    return value if type(value) is kind else _refuse(f"a {type(value).__name__} instead of a {kind.__name__}")


# ---- encoding and decoding


class _Encoder:
    def __init__(self) -> None:
        self.buffers: list[memoryview] = []

    def encode(self, value: Any, depth: int) -> Any:
        if _are_json((value,)):
            return value
        if depth > _DEEPEST:
            _refuse("data that is nested too deeply, or contains itself")
        kind = type(value)
        name = kind.__name__ if kind in _PYTHON else _library_name(value) or _refuse(kind)
        found = _TYPES[name]
        parts = [*found.parts(value)]
        memory = [self._memory(parts.pop())] if found.has_memory else []
        if not _are_json(parts):
            parts = [self.encode(part, depth + 1) for part in parts]
        return [name, *parts, *memory]

    def _memory(self, view: memoryview) -> int | str:
        if view.nbytes < codec.IN_BAND or len(self.buffers) >= codec.BESIDE:
            return base64.b64encode(view).decode("ascii")
        self.buffers.append(view)
        return len(self.buffers) - 1


class _Decoder:
    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = dict(enumerate(buffers))

    def decode(self, node: Any, depth: int) -> Any:
        if type(node) is not list:
            return _refuse("a JSON object") if type(node) is dict else node
        if depth > _DEEPEST:
            _refuse("data that is nested too deeply")
        name, *values = node
        found = _TYPES.get(name) or _refuse(f"{name!r:.100}")
        if not _JSON.issuperset(map(type, values)):
            values = [self.decode(value, depth + 1) for value in values]
        if found.kinds and not found.kinds.issuperset(map(type, values)):
            _refuse(f"an invalid {name}")
        if found.has_memory:
            values.append(self._memory(values.pop()))
        return found.make(*values)

    def _memory(self, given: Any) -> bytearray | memoryview:
        """A buffer, which only one object may use, or what base64 stands for."""
        if type(given) is int:
            return self._buffers.pop(given)
        return bytearray(base64.b64decode(_is(given, str), validate=True))


def _are_json(values: Sequence[Any]) -> bool:
    """Whether JSON has all these values. Large integers become hexadecimal, which takes linear time."""
    kinds = {*map(type, values)}
    return kinds <= _JSON and (int not in kinds or all(v.bit_length() < 64 for v in values if type(v) is int))


# ---- what types are made of


def _fraction(numerator: int, denominator: int) -> fractions.Fraction:
    if max(numerator.bit_length(), denominator.bit_length()) > _BITS:
        _refuse("a very large Fraction")
    return fractions.Fraction(numerator, denominator)


def _items(table: Any) -> Iterable[Any]:
    """Keys and values in turn."""
    if getattr(table, "default_factory", None) is not None:
        _refuse("a defaultdict with a factory")
    return itertools.chain.from_iterable(table.items())


def _hashed(keys: Sequence[Any]) -> Sequence[Any]:
    """Refuses keys if many have the same hash: inserting them takes quadratic time, without a pause for threads."""
    if len(keys) > _MANY and max(collections.Counter(map(hash, keys)).values()) > _ALIKE:
        _refuse("many keys with the same hash")
    return keys


def _dict(*items: Any) -> dict[Any, Any]:
    return dict(zip(_hashed(items[::2]), items[1::2], strict=True))


def _ordered(metadata: Any, *items: Any) -> Any:
    found = collections.OrderedDict(_dict(*items))
    if metadata is not None:  # of a torch state_dict
        vars(found)["_metadata"] = metadata
    return found


def _description(dtype: Any, least: int = 1) -> Any:
    """A dtype as numpy's own file format describes it: text, or lists and tuples of it."""
    import numpy as np

    if not dtype.hasobject and dtype.itemsize >= least:
        description = np.lib.format.dtype_to_descr(dtype)
        if np.lib.format.descr_to_dtype(description) == dtype:
            return description
    return _refuse(f"numpy.dtype {dtype!s:.50}")


def _dtype(description: Any) -> Any:
    import numpy as np

    dtype = np.lib.format.descr_to_dtype(description)
    return _refuse(f"numpy.dtype {dtype!s:.50}") if dtype.hasobject or not dtype.itemsize else dtype


def _extents(given: Sequence[Any]) -> Sequence[int]:
    """A shape or strides."""
    if len(given) > 64 or any(type(one) is not int or one < 0 for one in given):
        _refuse("an invalid shape")
    return given


def _array_parts(array: Any) -> Iterable[Any]:
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    flat = array if array.flags.forc else array.copy(order="C")
    return _description(array.dtype), array.shape, order, memoryview(flat.reshape(-1, order=order).view("u1"))


def _array(description: Any, shape: tuple[int, ...], order: str, memory: Any) -> Any:
    import numpy as np

    dtype = _dtype(description)
    if len(memory) != math.prod(_extents(shape)) * dtype.itemsize:
        _refuse("an array whose size differs from its memory")
    return np.ndarray(shape, dtype, memory, order="F" if order == "F" else "C")


def _scalar_parts(scalar: Any) -> Iterable[Any]:
    return _description(scalar.dtype, scalar.dtype.kind not in "US"), memoryview(scalar.tobytes())


def _scalar(description: Any, memory: Any) -> Any:
    if description in ("<U0", ">U0", "|S0"):
        import numpy as np

        return np.dtype(description).type()
    return _array(description, (), "C", memory)[()]


def _tensor_parts(tensor: Any) -> Iterable[Any]:
    import torch

    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        _refuse(f"a tensor of layout {tensor.layout}, dtype {tensor.dtype} and device {tensor.device}")
    flat, strides = _dense(tensor.detach().resolve_conj().resolve_neg().cpu())
    about = (str(tensor.dtype), tuple(tensor.shape), strides, str(tensor.device), tensor.requires_grad)
    return *about, codec.tensor_memory(flat)


def _dense(tensor: Any) -> tuple[Any, tuple[int, ...]]:
    """A contiguous tensor with the same elements, and the strides with which it is the given one."""
    order = sorted(range(tensor.dim()), key=lambda dimension: -tensor.stride(dimension))
    turned = tensor.permute(order)
    if turned.is_contiguous():  # as it is in memory, which may be in another order than its dimensions
        return turned, tensor.stride()
    flat = tensor.contiguous()
    return flat, flat.stride()


def _tensor(name: str, shape: Sequence[int], strides: Sequence[int], device: str, grad: bool, memory: Any) -> Any:
    import torch

    dtype, count = _torch_dtype(name), math.prod(_extents(shape))
    last = sum((extent - 1) * step for extent, step in zip(shape, _extents(strides), strict=True))
    if len(memory) != count * dtype.itemsize or (count and last >= count):
        _refuse("a tensor whose size differs from its memory")
    empty = torch.empty(0, dtype=dtype, device="cpu")
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(dtype) if count else empty
    return flat.as_strided(shape, strides).to(codec.torch_device(device)).requires_grad_(grad)


def _parameter(*parts: Any) -> Any:
    import torch

    tensor = _tensor(*parts)
    return torch.nn.Parameter(tensor.detach(), tensor.requires_grad)


def _torch_size(*shape: Any) -> Any:
    import torch

    return torch.Size(_extents(shape))


def _torch_dtype(name: str) -> Any:
    import torch

    if not re.fullmatch(r"torch\.(bool|bfloat16|(complex|float|u?int)\d\w{0,16})", name):
        _refuse(f"a dtype {name!r:.50}")
    return _is(getattr(torch, name[6:], None), torch.dtype)


def _library_name(value: Any) -> str | None:
    """The name of a type of numpy or torch, if they are loaded."""
    kind = type(value)
    if (np := sys.modules.get("numpy")) is not None:
        if kind is np.ndarray:
            return "numpy.ndarray"
        for base in (np.generic, np.dtype):
            if isinstance(value, base):
                return f"numpy.{base.__name__}"
    torch = sys.modules.get("torch")
    if torch is not None and kind in (torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype):
        return f"torch.{kind.__name__}"
    return None


_Type = collections.namedtuple("_Type", "parts make kinds has_memory", defaults=((), False))
"""How a type is taken apart and made again; the types that its parts may have, any if empty; is the last one memory."""


def _text(value: Any) -> tuple[str]:
    return (str(value),)


def _row(kind: type) -> _Type:
    return _Type(iter, lambda *values: kind(values))


def _set(kind: type) -> _Type:
    return _Type(iter, lambda *values: kind(_hashed(values)))


_DATE: Final = ("year", "month", "day")
_TIME: Final = ("hour", "minute", "second", "microsecond", "tzinfo", "fold")
_RANGE: Final = attrgetter("start", "stop", "step")
_ZONE: Final = {int, datetime.timezone, type(None)}
_PYTHON: Final = {
    list: _row(list),
    tuple: _row(tuple),
    set: _set(set),
    frozenset: _set(frozenset),
    int: _Type(lambda value: (hex(value),), lambda text: int(text, 16), {str}),
    bytes: _Type(lambda value: (memoryview(value),), bytes, {int, str}, True),
    bytearray: _Type(lambda value: (memoryview(value),), bytearray, {int, str}, True),
    dict: _Type(_items, _dict),
    collections.OrderedDict: _Type(lambda table: (getattr(table, "_metadata", None), *_items(table)), _ordered),
    collections.defaultdict: _Type(_items, lambda *items: collections.defaultdict(None, _dict(*items))),
    collections.deque: _Type(lambda row: (row.maxlen, *row), lambda most, *row: collections.deque(row, most)),
    complex: _Type(attrgetter("real", "imag"), complex, {float}),
    range: _Type(_RANGE, range, {int}),
    slice: _Type(_RANGE, slice, {int, float, str, type(None)}),
    decimal.Decimal: _Type(_text, decimal.Decimal, {str}),
    fractions.Fraction: _Type(attrgetter("numerator", "denominator"), _fraction, {int}),
    uuid.UUID: _Type(_text, uuid.UUID, {str}),
    datetime.date: _Type(attrgetter(*_DATE), datetime.date, {int}),
    datetime.time: _Type(attrgetter(*_TIME), lambda *parts: datetime.time(*parts[:-1], fold=parts[-1]), _ZONE),
    datetime.datetime: _Type(
        attrgetter(*_DATE, *_TIME), lambda *parts: datetime.datetime(*parts[:-1], fold=parts[-1]), _ZONE
    ),
    datetime.timedelta: _Type(attrgetter("days", "seconds", "microseconds"), datetime.timedelta, {int}),
    datetime.timezone: _Type(lambda zone: zone.__getinitargs__(), datetime.timezone, {datetime.timedelta, str}),
    pathlib.PurePosixPath: _Type(_text, pathlib.PurePosixPath, {str}),
    pathlib.PureWindowsPath: _Type(_text, pathlib.PureWindowsPath, {str}),
    type(pathlib.Path()): _Type(_text, pathlib.Path, {str}),
}
_TYPES: Final = {
    **{kind.__name__: found for kind, found in _PYTHON.items()},
    "numpy.ndarray": _Type(_array_parts, _array, {str, list, tuple, int}, True),
    "numpy.generic": _Type(_scalar_parts, _scalar, {str, list, tuple, int}, True),
    "numpy.dtype": _Type(lambda dtype: (_description(dtype),), _dtype, {str, list, tuple}),
    "torch.Tensor": _Type(_tensor_parts, _tensor, {str, tuple, bool, int}, True),
    "torch.Parameter": _Type(_tensor_parts, _parameter, {str, tuple, bool, int}, True),
    "torch.Size": _Type(iter, _torch_size, {int}),
    "torch.dtype": _Type(_text, _torch_dtype, {str}),
}
