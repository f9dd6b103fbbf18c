"""Plain data as JSON and raw buffers: how results of hosts that are not trusted are encoded. Nothing is unpickled.

None, bool, int, float and str are what they are in JSON. Anything else is a list that begins with the name of its type.
Bytes, arrays and tensors refer to a buffer by number, or have base64 in place of a small one. An object that is
referred to twice is decoded as two objects.
"""

from __future__ import annotations

import base64
import builtins
import collections
import datetime
import decimal
import fractions
import json
import pathlib
import re
import sys
import uuid

from skyfab.protocol import codec

TYPE_CHECKING = False  # see frames.py
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any, Final, NoReturn

    from skyfab.protocol.frames import Buffer

_DEEPEST: Final = 200
"""How deep containers may be nested: so deep that no Python fails at encoding, decoding, printing or deleting them."""
_BITS: Final = 65536
"""Maximum bits of a fraction's numerator and denominator: reducing it takes quadratic time."""
_SIMPLE: Final = frozenset({type(None), bool, float, str})
_NUMBERS: Final = frozenset({bool, int})
_JSON: Final = _SIMPLE | {int}
_ATTRIBUTES: Final = ("__notes__", "name", "path")
"""The attributes that an exception keeps in addition to its arguments."""


class NotPlain(Exception):
    """The type that is not plain data, or what is wrong with data from a host."""


def dumps(value: Any) -> codec.Payload:
    """Encodes plain data, numpy arrays and torch tensors. Raises NotPlain."""
    encoder = _Encoder()
    document = encoder.encode(value, 0)
    return codec.Payload(json.dumps(document, separators=(",", ":")).encode("ascii"), encoder.buffers)


def loads(data: Buffer, buffers: Sequence[memoryview] = ()) -> Any:
    """Decodes what `dumps` has encoded. Arrays and tensors use the memory of the buffers. Raises NotPlain."""
    try:
        document = json.loads(bytes(data).decode("ascii"))
        return _Decoder(buffers).decode(document, 0)
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
    return value if type(value) is kind else _refuse(f"a {type(value).__name__} in place of a {kind.__name__}")


# ---- types that consist of a few values


def _fraction(numerator: int, denominator: int) -> fractions.Fraction:
    if max(numerator.bit_length(), denominator.bit_length()) > _BITS:
        _refuse("a very large Fraction")
    return fractions.Fraction(numerator, denominator)


def _datetime(*parts: Any) -> datetime.datetime:
    return datetime.datetime(*parts[:-1], fold=parts[-1])


def _time(*parts: Any) -> datetime.time:
    return datetime.time(*parts[:-1], fold=parts[-1])


_DATE: Final = ("year", "month", "day")
_TIME: Final = ("hour", "minute", "second", "microsecond", "tzinfo", "fold")


def _fields(*names: str) -> Callable[[Any], tuple[Any, ...]]:
    return lambda value: tuple(getattr(value, name) for name in names)


_VALUES: Final[dict[type, tuple[str, Callable[[Any], Iterable[Any]], Callable[..., Any], tuple[type, ...]]]] = {
    complex: ("complex", _fields("real", "imag"), complex, (float,)),
    range: ("range", _fields("start", "stop", "step"), range, (int,)),
    slice: ("slice", _fields("start", "stop", "step"), slice, (int, float, str, type(None))),
    decimal.Decimal: ("Decimal", lambda value: (str(value),), decimal.Decimal, (str,)),
    fractions.Fraction: ("Fraction", _fields("numerator", "denominator"), _fraction, (int,)),
    uuid.UUID: ("UUID", _fields("hex"), uuid.UUID, (str,)),
    datetime.date: ("date", _fields(*_DATE), datetime.date, (int,)),
    datetime.time: ("time", _fields(*_TIME), _time, (int, datetime.timezone, type(None))),
    datetime.datetime: ("datetime", _fields(*_DATE, *_TIME), _datetime, (int, datetime.timezone, type(None))),
    datetime.timedelta: ("timedelta", _fields("days", "seconds", "microseconds"), datetime.timedelta, (int,)),
    datetime.timezone: (
        "timezone",
        lambda value: value.__getinitargs__(),
        datetime.timezone,
        (datetime.timedelta, str),
    ),
    pathlib.PurePosixPath: ("PurePosixPath", lambda value: (str(value),), pathlib.PurePosixPath, (str,)),
    pathlib.PureWindowsPath: ("PureWindowsPath", lambda value: (str(value),), pathlib.PureWindowsPath, (str,)),
    type(pathlib.Path()): ("Path", lambda value: (str(value),), pathlib.Path, (str,)),
}
"""Types: name, the values that an object consists of, what makes it of them, and the types that they may have."""
_MAKERS: Final = {name: (make, kinds) for name, _, make, kinds in _VALUES.values()}
_ROWS: Final[dict[type, str]] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
_ROW_MAKERS: Final = {name: kind for kind, name in _ROWS.items()}


# ---- encoding


class _Encoder:
    def __init__(self) -> None:
        self.buffers: list[memoryview] = []

    def encode(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _SIMPLE:
            return value
        if kind is int:
            return value if value.bit_length() < 64 else ["int", hex(value)]
        if depth > _DEEPEST:
            _refuse("data that is nested too deep, or contains itself")
        if kind in _ROWS:
            return [_ROWS[kind], *self._row(value, depth)]
        if kind in _VALUES:
            name, parts_of, *_ = _VALUES[kind]
            return [name, *self._row(parts_of(value), depth)]
        if kind is bytes or kind is bytearray:
            return [kind.__name__, self._memory(memoryview(value))]
        return self._table(kind, value, depth) or self._array(kind, value) or self._tensor(kind, value) or _refuse(kind)

    def _row(self, values: Iterable[Any], depth: int) -> Iterable[Any]:
        values = values if isinstance(values, (list, tuple)) else [*values]
        kinds = {*map(type, values)}
        if kinds <= _SIMPLE or (kinds <= _NUMBERS and all(value.bit_length() < 64 for value in values)):
            return values
        return [self.encode(value, depth + 1) for value in values]

    def _table(self, kind: type, value: Any, depth: int) -> Any:
        if kind is collections.deque:
            return ["deque", value.maxlen, *self._row(value, depth)]
        if kind not in (dict, collections.OrderedDict, collections.defaultdict):
            return None
        if getattr(value, "default_factory", None) is not None:
            _refuse("a defaultdict with a factory")
        metadata = self.encode(getattr(value, "_metadata", None), depth + 1)  # of a torch state_dict
        return [kind.__name__, metadata, self._items(value.keys(), depth), self._items(value.values(), depth)]

    def _items(self, values: Iterable[Any], depth: int) -> list[Any]:
        return ["list", *self._row(values, depth)]

    def _memory(self, view: memoryview) -> int | str:
        if view.nbytes < codec.IN_BAND or len(self.buffers) >= codec.BESIDE:
            return base64.b64encode(view).decode("ascii")
        self.buffers.append(view)
        return len(self.buffers) - 1

    def _array(self, kind: type, value: Any) -> Any:
        np = sys.modules.get("numpy")
        if np is None:
            return None
        if isinstance(value, np.dtype):
            return ["numpy.dtype", _description(value)]
        if issubclass(kind, np.generic):
            return ["numpy.scalar", _description(value.dtype), self._memory(memoryview(value.tobytes()))]
        if kind is not np.ndarray:
            return None
        description = _description(value.dtype)
        order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        flat = value if value.flags.forc else value.copy(order="C")
        memory = memoryview(flat.reshape(-1, order=order).view(np.uint8))
        return ["numpy.ndarray", description, list(value.shape), order, self._memory(memory)]

    def _tensor(self, kind: type, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None:
            return None
        if kind is torch.Size:
            return ["torch.Size", *value]
        if kind is torch.dtype:
            return ["torch.dtype", str(value)]
        if kind not in (torch.Tensor, torch.nn.Parameter):
            return None
        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            _refuse(f"a tensor of layout {value.layout}, dtype {value.dtype} and device {value.device}")
        flat, strides = _dense(value.detach().resolve_conj().resolve_neg().cpu())
        about = [str(value.dtype), list(value.shape), strides, str(value.device), value.requires_grad]
        return ["torch.Tensor", kind is not torch.Tensor, *about, self._memory(codec.tensor_memory(flat))]


def _dense(tensor: Any) -> tuple[Any, list[int]]:
    """A contiguous tensor with the same elements, and the strides with which it is the given one."""
    order = sorted(range(tensor.dim()), key=lambda dimension: -tensor.stride(dimension))
    turned = tensor.permute(order)
    if turned.is_contiguous():  # as it is in memory, which may be in another order than its dimensions
        return turned, list(tensor.stride())
    flat = tensor.contiguous()
    return flat, list(flat.stride())


def _description(dtype: Any) -> Any:
    """A dtype as numpy's own file format describes it."""
    import numpy as np

    if not dtype.hasobject and dtype.itemsize:
        description = np.lib.format.dtype_to_descr(dtype)
        if np.lib.format.descr_to_dtype(description) == dtype:
            return description
    return _refuse(f"numpy.dtype {dtype!s:.50}")


# ---- decoding


class _Decoder:
    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = dict(enumerate(buffers))

    def decode(self, node: Any, depth: int) -> Any:
        if type(node) is not list:
            return _refuse("a JSON object") if type(node) is dict else node
        if depth > _DEEPEST:
            _refuse("data that is nested too deep")
        name, *parts = node
        if name in _ROW_MAKERS:
            row = self._row(parts, depth)
            return row if name == "list" else _ROW_MAKERS[name](row)
        if name in _MAKERS:
            make, kinds = _MAKERS[name]
            values = self._row(parts, depth)
            return make(*values) if all(type(value) in kinds for value in values) else _refuse(f"an odd {name}")
        if name in _READERS:
            return _READERS[name](self, depth, *parts)
        return _refuse(f"{name!r:.100}")

    def _row(self, parts: list[Any], depth: int) -> list[Any]:
        if _JSON.issuperset(map(type, parts)):
            return parts
        return [self.decode(part, depth + 1) for part in parts]

    def read_int(self, depth: int, text: Any) -> int:
        return int(_is(text, str), 16)

    def read_bytes(self, depth: int, memory: Any) -> bytes:
        return bytes(self._memory(memory))

    def read_bytearray(self, depth: int, memory: Any) -> bytearray:
        return bytearray(self._memory(memory))

    def read_deque(self, depth: int, most: Any, *parts: Any) -> Any:
        return collections.deque(self._row([*parts], depth), None if most is None else _is(most, int))

    def read_dict(self, depth: int, *parts: Any) -> Any:
        return self._table(dict, depth, *parts)

    def read_defaultdict(self, depth: int, *parts: Any) -> Any:
        return self._table(collections.defaultdict, depth, *parts)

    def read_ordered(self, depth: int, metadata: Any, *parts: Any) -> Any:
        found = self._table(collections.OrderedDict, depth, None, *parts)
        if metadata is not None:
            vars(found)["_metadata"] = self.decode(metadata, depth + 1)
        return found

    def _table(self, kind: Any, depth: int, metadata: Any, keys: Any, values: Any) -> Any:
        pairs = zip(_is(self.decode(keys, depth), list), _is(self.decode(values, depth), list), strict=True)
        return dict(pairs) if kind is dict else kind(None, pairs) if kind is collections.defaultdict else kind(pairs)

    def _memory(self, given: Any) -> bytearray | memoryview:
        """A buffer, which only one object may use, or what base64 stands for."""
        if type(given) is int:
            return self._buffers.pop(given)
        return bytearray(base64.b64decode(_is(given, str), validate=True))

    def read_dtype(self, depth: int, description: Any) -> Any:
        return _dtype(description)

    def read_scalar(self, depth: int, description: Any, memory: Any) -> Any:
        return self.read_array(depth, description, [], "C", memory)[()]

    def read_array(self, depth: int, description: Any, shape: Any, order: Any, memory: Any) -> Any:
        import numpy as np

        dtype, ours, count = _dtype(description), self._memory(memory), 1
        for extent in _extents(shape):
            count *= extent
        if len(ours) != count * dtype.itemsize:
            _refuse("an array of another size than its memory")
        return np.ndarray(tuple(shape), dtype, ours, order="F" if order == "F" else "C")

    def read_size(self, depth: int, *shape: Any) -> Any:
        import torch

        return torch.Size(_extents([*shape]))

    def read_torch_dtype(self, depth: int, name: Any) -> Any:
        import torch

        if not re.fullmatch(r"torch\.(bool|bfloat16|(complex|float|u?int)\d\w{0,16})", _is(name, str)):
            _refuse(f"a dtype {name!r:.50}")
        return _is(getattr(torch, name[6:], None), torch.dtype)

    def read_tensor(
        self, depth: int, owned: Any, name: Any, shape: Any, strides: Any, device: Any, grad: Any, memory: Any
    ) -> Any:
        import torch

        dtype, ours, last, count = self.read_torch_dtype(depth, name), self._memory(memory), 0, 1
        for extent, step in zip(_extents(shape), _extents(strides), strict=True):
            last += (extent - 1) * step
            count *= extent
        if len(ours) != count * dtype.itemsize or (count and last >= count):
            _refuse("a tensor of another size than its memory")
        flat = torch.frombuffer(ours, dtype=torch.uint8).view(dtype) if count else torch.empty(0, dtype=dtype)
        tensor = flat.as_strided(shape, strides).to(codec.torch_device(_is(device, str)))
        return torch.nn.Parameter(tensor, grad is True) if owned is True else tensor.requires_grad_(grad is True)


def _extents(given: Any) -> list[int]:
    """A shape or strides."""
    if type(given) is not list or len(given) > 64 or any(type(one) is not int or one < 0 for one in given):
        _refuse("an odd shape")
    found: list[int] = given
    return found


def _dtype(description: Any) -> Any:
    import numpy as np

    dtype = np.lib.format.descr_to_dtype(_checked(description))
    return _refuse(f"numpy.dtype {dtype!s:.50}") if dtype.hasobject or not dtype.itemsize else dtype


def _checked(description: Any) -> Any:
    """The description of a dtype with tuples where JSON has lists. Refuses what numpy would have to interpret."""
    if type(description) is str:
        is_known = re.fullmatch(r"[<>|=]?([biufcSUV]\d{1,9}|[mM]8(\[\d{0,9}[a-zA-Z]{1,2}\])?)", description)
        return description if is_known else _refuse(f"numpy.dtype {description!r:.50}")
    fields = []
    for name, inner, *shape in _is(description, list):
        title = tuple(_is(part, str) for part in name) if type(name) is list else _is(name, str)
        fields.append((title, _checked(inner), *(tuple(_extents(one)) for one in shape)))
    return fields


_READERS: Final[dict[str, Callable[..., Any]]] = {
    "int": _Decoder.read_int,
    "bytes": _Decoder.read_bytes,
    "bytearray": _Decoder.read_bytearray,
    "deque": _Decoder.read_deque,
    "dict": _Decoder.read_dict,
    "OrderedDict": _Decoder.read_ordered,
    "defaultdict": _Decoder.read_defaultdict,
    "numpy.dtype": _Decoder.read_dtype,
    "numpy.scalar": _Decoder.read_scalar,
    "numpy.ndarray": _Decoder.read_array,
    "torch.Size": _Decoder.read_size,
    "torch.dtype": _Decoder.read_torch_dtype,
    "torch.Tensor": _Decoder.read_tensor,
}
"""Each is called with the decoder, the depth, and the items that follow the name."""
