"""The codec: user data to bytes and back, without copying what is large.

Pickle protocol 5 hands out large buffers as views of the caller's memory. Torch tensors leave by
storage, so that views and tied weights stay tied; what was on a GPU arrives on a GPU where there is one.
"""

from __future__ import annotations

import io
import pickle
import sys
import types

import cloudpickle

TYPE_CHECKING = False  # see frames
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Final

    from skyfab.protocol.streams import Buffer

IN_BAND: Final = 4096
"""Buffers below this size are cheaper inside the pickle than beside it."""


_BESIDE: Final = 4096
"""Buffers beside one pickle; past that they go inside: a message has only so many parts."""
_ATOMS: Final = frozenset({type(None), bool, int, float, str})


class Payload:
    """A pickled object: the pickle, and the buffers that it refers to in order."""

    __slots__ = ("buffers", "data")

    def __init__(self, data: bytes, buffers: Sequence[memoryview] = ()) -> None:
        self.data = data
        self.buffers = tuple(buffers)

    @property
    def size(self) -> int:
        return len(self.data) + sum(map(len, self.buffers))


def dumps(value: Any) -> Payload:
    """Pickles `value`. The buffers are views of its memory: leave it alone until they are sent.

    Raises whatever pickling raises.
    """
    if type(value) in _ATOMS or (type(value) is tuple and all(type(v) in _ATOMS for v in value)):
        return Payload(pickle.dumps(value, protocol=5))  # nothing in there for cloudpickle to do
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return Payload(file.getvalue(), pickler.buffers)


def loads(data: Buffer, buffers: Sequence[memoryview] = ()) -> Any:
    """The object again. Its arrays and tensors live in the given buffers."""
    return pickle.loads(data, buffers=buffers)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def __init__(self, file: io.BytesIO) -> None:
        self.buffers: list[memoryview] = []
        self._storages: dict[int, _Storage] = {}
        torch = sys.modules.get("torch")
        self._typed = getattr(getattr(torch, "storage", None), "TypedStorage", None)
        self._untyped = getattr(torch, "UntypedStorage", None)
        self._rebuild = getattr(getattr(torch, "_utils", None), "_rebuild_tensor_v3", None)
        super().__init__(file, protocol=5, buffer_callback=self._beside)

    def _beside(self, buffer: pickle.PickleBuffer) -> bool:
        try:
            view = buffer.raw()
        except BufferError:  # not contiguous: pickle says so itself
            return True
        if view.nbytes < IN_BAND or len(self.buffers) >= _BESIDE:
            return True
        self.buffers.append(view)
        return False

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, BaseException) and _is_plain(type(obj)):
            return _exception, (type(obj), obj.args, obj.__dict__)
        if self._untyped is not None:
            if type(obj) is self._typed:
                return _typed, (self._holder(obj._untyped_storage), obj.dtype)
            if type(obj) is self._untyped:
                return _same, (self._holder(obj),)
            if obj is self._rebuild:
                return _rebuilder, ()
        return super().reducer_override(obj)

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
