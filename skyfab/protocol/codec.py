"""The codec: user data to bytes and back, without copying what is large.

Pickle protocol 5 hands out large buffers as views of the caller's memory. Torch tensors leave by
storage, so that views and tied weights stay tied; what was on a GPU arrives on a GPU where there is one.
What is `Packed` was pickled before: its content is only referred to, and its object is what arrives.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import types

import cloudpickle

from skyfab.protocol.blobs import allocate

TYPE_CHECKING = False  # see frames
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any, Final

    from skyfab.protocol.frames import Buffer

IN_BAND: Final = 4096
"""Buffers below this size are cheaper inside the pickle than beside it."""


_BESIDE: Final = 4096
"""Buffers beside one pickle; past that they go inside: a message has only so many parts."""
_ATOMS: Final = frozenset({type(None), bool, int, float, str})
_MOST_PACKED: Final = 1000
"""Packed objects that one pickle refers to: each is a part of its message, and a mapping where it arrives."""
_ALIGNED: Final = 64
_NO_REFS: Final[Mapping[int, str]] = types.MappingProxyType({})


class Payload:
    """A pickled object: the pickle, and the buffers that it refers to in order."""

    __slots__ = ("buffers", "data", "refs")

    def __init__(self, data: bytes, buffers: Sequence[memoryview] = (), refs: Mapping[int, str] = _NO_REFS) -> None:
        self.data = data
        self.buffers = tuple(buffers)
        self.refs = refs
        """Which of the buffers are packed objects: the `id` of the buffer, and the name of its content."""

    @property
    def size(self) -> int:
        """In bytes, without packed objects: those are sent to a host once."""
        if self.refs:
            return len(self.data) + sum(len(buffer) for buffer in self.buffers if id(buffer) not in self.refs)
        return len(self.data) + sum(map(len, self.buffers))


class Packed:
    """Stands for an object that is pickled already, in one piece, and named by that content."""

    name: str
    memory: memoryview


def dumps(value: Any) -> Payload:
    """Pickles `value`. The buffers are views of its memory: leave it alone until they are sent.

    Raises whatever pickling raises.
    """
    if type(value) in _ATOMS or (type(value) is tuple and all(type(v) in _ATOMS for v in value)):
        return Payload(pickle.dumps(value, protocol=5))  # nothing in there for cloudpickle to do
    file, beside = io.BytesIO(), _Beside()
    _Pickler(file, beside).dump(value)
    return Payload(file.getvalue(), beside.buffers, beside.refs or _NO_REFS)


def loads(data: Buffer, buffers: Sequence[memoryview] = ()) -> Any:
    """The object again. Its arrays and tensors live in the given buffers."""
    return pickle.loads(data, buffers=buffers)


def pack(value: Any) -> memoryview:
    """Pickles `value` into one piece of memory of its own. Raises whatever pickling raises."""
    payload = dumps(value)
    pieces: tuple[Buffer, ...] = (payload.data, *payload.buffers)
    sizes = [len(pieces), *map(len, pieces)]
    *places, end = _places(sizes)
    memory = allocate(end)
    struct.pack_into(f"<{len(sizes)}Q", memory, 0, *sizes)
    for place, piece in zip(places, pieces, strict=True):
        memory[place : place + len(piece)] = memoryview(piece)
    return memory


def unpack(memory: memoryview) -> Any:
    """The object that was packed. It lives in this memory."""
    (count,) = struct.unpack_from("<Q", memory)
    sizes = struct.unpack_from(f"<{count + 1}Q", memory)
    pieces = [memory[place : place + size] for place, size in zip(_places(sizes), sizes[1:], strict=False)]
    return loads(pieces[0], pieces[1:])


def _places(sizes: Sequence[int]) -> Iterator[int]:
    """Where the pieces of a packed object begin, at aligned offsets behind their sizes, and the end of the last."""
    place = 8 * len(sizes)
    for size in sizes[1:]:
        place += -place % _ALIGNED
        yield place
        place += size
    yield place


class _Beside:
    """What travels beside a pickle. It knows nothing of the pickler, whose memory would last as long as a cycle."""

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self.refs: dict[int, str] = {}
        self.packed: dict[pickle.PickleBuffer, str] = {}

    def __call__(self, buffer: pickle.PickleBuffer) -> bool:
        try:
            view = buffer.raw()
        except BufferError:  # not contiguous: pickle says so itself
            return True
        name = self.packed.get(buffer)
        if name is not None:
            self.refs[id(view)] = name
        elif view.nbytes < IN_BAND or len(self.buffers) - len(self.refs) >= _BESIDE:
            return True
        self.buffers.append(view)
        return False


def send_by_value(module: Any) -> None:
    """What is defined in this module is sent whole: no host can import it."""
    cloudpickle.register_pickle_by_value(module)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def __init__(self, file: io.BytesIO, beside: _Beside) -> None:
        self._packed = beside.packed
        self._storages: dict[int, _Storage] = {}
        torch = sys.modules.get("torch")
        self._typed = getattr(getattr(torch, "storage", None), "TypedStorage", None)
        self._untyped = getattr(torch, "UntypedStorage", None)
        self._rebuild = getattr(getattr(torch, "_utils", None), "_rebuild_tensor_v3", None)
        super().__init__(file, protocol=5, buffer_callback=beside)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, BaseException) and _is_plain(type(obj)):
            return _exception, (type(obj), obj.args, obj.__dict__)
        if isinstance(obj, Packed):
            return unpack, (self._referred(obj),)
        if self._untyped is not None:
            if type(obj) is self._typed:
                return _typed, (self._holder(obj._untyped_storage), obj.dtype)
            if type(obj) is self._untyped:
                return _same, (self._holder(obj),)
            if obj is self._rebuild:
                return _rebuilder, ()
        return super().reducer_override(obj)

    def _referred(self, packed: Packed) -> pickle.PickleBuffer:
        if len(self._packed) >= _MOST_PACKED:
            raise pickle.PicklingError(
                f"more than {_MOST_PACKED} references in one call: put together what belongs together"
            )
        # Not of the view: where that is a part of cyclic garbage, Python 3.11 crashes over views of views.
        buffer = pickle.PickleBuffer(packed.memory.obj)
        self._packed[buffer] = packed.name
        return buffer

    def _holder(self, untyped: Any) -> _Storage:
        """One holder per storage: pickle's memo then sends it once and ties it again."""
        return self._storages.setdefault(untyped._cdata, _Storage(untyped))


def _is_plain(kind: type[BaseException]) -> bool:
    """It leaves pickling to BaseException, which calls its own constructor again, with `args` that may not fit."""
    return (
        isinstance(kind.__init__, types.FunctionType)
        and kind.__reduce__ is BaseException.__reduce__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__setstate__ is BaseException.__setstate__
    )


def _exception(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """The exception again, whatever its constructor asks for."""
    error = kind.__new__(kind, *args)
    builtin = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    try:
        builtin.__init__(error, *args)  # type: ignore[misc]  # some keep more than `args`
    except TypeError:
        pass
    error.args = args
    error.__dict__.update(state)
    return error


class _Storage:
    """Stands for a torch storage while it is pickled."""

    __slots__ = ("untyped",)

    def __init__(self, untyped: Any) -> None:
        self.untyped = untyped

    def __reduce__(self) -> tuple[Any, ...]:
        import ctypes  # only where there are tensors: a cold host has no time for it

        untyped = self.untyped if self.untyped.device.type == "cpu" else self.untyped.cpu()
        size = untyped.nbytes()
        if not size:
            return _storage, (b"", str(self.untyped.device))
        memory = (ctypes.c_ubyte * size).from_address(untyped.data_ptr())
        memory.owner = untyped  # the view below must keep the storage alive
        return _storage, (pickle.PickleBuffer(memory), str(self.untyped.device))


def _storage(memory: Any, device: str) -> Any:
    import torch

    place = "cpu"
    if device.startswith("cuda") and torch.cuda.is_available():
        index = int(device.partition(":")[2] or 0)
        place = f"cuda:{index if index < torch.cuda.device_count() else 0}"
    if not len(memory):
        return torch.UntypedStorage(0, device=place)
    return torch.frombuffer(memory, dtype=torch.uint8).to(place).untyped_storage()


def _typed(untyped: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _same(untyped: Any) -> Any:
    return untyped


def _rebuilder() -> Any:
    """Stands for torch's own, which takes types without a typed storage (uint16, float8) from `torch.save` alone."""
    return _rebuild_v3


def _rebuild_v3(storage: Any, *rest: Any) -> Any:
    import torch

    return torch._utils._rebuild_tensor_v3(_typed(storage, torch.uint8), *rest)
