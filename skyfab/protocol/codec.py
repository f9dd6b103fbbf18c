"""Serialization of user data: cloudpickle with out-of-band buffers, without copying large data.

Pickle protocol 5 exposes large buffers as views of the caller's memory. Torch tensors are pickled by storage, so that
views and tied weights keep sharing memory; tensors from a GPU are restored on a GPU where there is one. A `Packed`
object was pickled earlier: the pickle only refers to its content, and the receiver gets the object itself.
"""

from __future__ import annotations

import copyreg
import functools
import io
import operator
import pickle
import struct
import sys
import types

import cloudpickle

from skyfab.protocol.blobs import LARGE, allocate, bytes_in, forget_unused

TYPE_CHECKING = False  # see frames.py
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any, Final

    from skyfab.protocol.frames import Buffer

    Reference = Callable[[Any], tuple[Any, ...] | None]

IN_BAND: Final = 4096
"""Buffers smaller than this are cheaper inside the pickle than out-of-band."""
BESIDE: Final = 4096
"""Out-of-band buffers of one pickle. Further ones go into the pickle: the parts of a message are limited."""
_ATOMS: Final = frozenset({type(None), bool, int, float, str})
_ALIGNED: Final = 64
_NO_REFS: Final[Mapping[int, str]] = types.MappingProxyType({})


class Payload:
    """A pickled object: the pickle, and its out-of-band buffers in the order in which it refers to them."""

    __slots__ = ("buffers", "data", "kinds", "refs")

    def __init__(
        self,
        data: bytes,
        buffers: Sequence[memoryview] = (),
        refs: Mapping[int, str] = _NO_REFS,
        kinds: Mapping[int, str] = _NO_REFS,
    ) -> None:
        self.data = data
        self.buffers = tuple(buffers)
        self.refs = refs
        """The buffers that are packed objects: `id` of the buffer to name of its content."""
        self.kinds = kinds
        """The buffers that are bytes: `id` of the buffer to the kind (`blobs.KINDS`)."""

    @property
    def parts(self) -> tuple[Any, ...]:
        """Its parts as a message lists them."""
        if not self.kinds:
            return (len(self.data), *map(len, self.buffers))
        kinds = [self.kinds.get(id(buffer)) for buffer in self.buffers]
        sizes = [(kind, len(found)) if kind else len(found) for kind, found in zip(kinds, self.buffers, strict=True)]
        return (len(self.data), *sizes)

    def copied(self) -> Payload:
        """The same with buffers of its own, which do not change with the object."""
        if not self.buffers:
            return self
        own = {*self.refs, *self.kinds}
        buffers = [buffer if id(buffer) in own else memoryview(bytes(buffer)) for buffer in self.buffers]
        return Payload(self.data, buffers, self.refs, self.kinds)

    @property
    def size(self) -> int:
        """Size in bytes without packed objects, which are sent to a host only once."""
        if self.refs:
            return len(self.data) + sum(len(buffer) for buffer in self.buffers if id(buffer) not in self.refs)
        return len(self.data) + sum(map(len, self.buffers))


class Packed:
    """Refers to an object that is already pickled, as one blob that is named by its content."""

    name: str
    memory: memoryview


def dumps(
    value: Any, reference: Reference | None = None, *, then: Sequence[Any] = (), same_gpus: bool = False
) -> Payload:
    """Pickles `value`, `then` others for `loader`. The buffers are views of its memory: keep it until they are sent.

    With `same_gpus`, it is unpickled once, on this machine: large tensors stay on their GPU.
    An object for which `reference` returns a function and its arguments is unpickled as what that function returns.
    Raises whatever pickling raises.
    """
    if not then and (type(value) in _ATOMS or (type(value) is tuple and _ATOMS.issuperset(map(type, value)))):
        return Payload(pickle.dumps(value, protocol=5))  # faster, and cloudpickle is not needed for these types
    forget_unused()
    beside = _Beside()
    pickler = _Pickler(beside, reference, same_gpus)
    try:
        for one in (value, *then):
            pickler.dump(one)
    except BaseException:
        for storage in pickler.storages.values():
            storage.release()
        raise
    return beside.payload()


def dumper() -> Callable[[Any], Payload]:
    """A function that pickles many values, each by itself, in less time than `dumps`."""
    beside = _Beside()
    pickler = _Pickler(beside, None, same_gpus=False)

    def dump(value: Any) -> Payload:
        if type(value) in _ATOMS or (type(value) is tuple and _ATOMS.issuperset(map(type, value))):
            return Payload(pickle.dumps(value, protocol=5))
        beside.begin()
        pickler.clear_memo()
        pickler.storages.clear()
        pickler.dump(value)
        return beside.payload()

    forget_unused()
    return dump


def dumps_exception(error: Exception) -> Payload:
    """Pickles an exception without its traceback, which cannot be pickled. Raises whatever pickling raises."""
    return dumps(error.with_traceback(None))  # not by assignment, which its class may forbid


def loads(data: Buffer, buffers: Sequence[Buffer] = ()) -> Any:
    """Unpickles an object. Its arrays and tensors use the memory of the given buffers."""
    return pickle.loads(data, buffers=buffers)


def loader(data: Buffer, buffers: Sequence[Buffer] = ()) -> Callable[[], Any]:
    """A function that returns, with each call, the next of the values that were pickled together."""
    return pickle.Unpickler(io.BytesIO(data), buffers=buffers).load


def pack(value: Any) -> memoryview:
    """Pickles `value` into one new block of memory. Raises whatever pickling raises."""
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
    """Restores the object that was packed. Its arrays and tensors use this memory."""
    (count,) = struct.unpack_from("<Q", memory)
    sizes = struct.unpack_from(f"<{count + 1}Q", memory)
    pieces = [memory[place : place + size] for place, size in zip(_places(sizes), sizes[1:], strict=False)]
    return loads(pieces[0], pieces[1:])


def _places(sizes: Sequence[int]) -> Iterator[int]:
    """The aligned offsets of a packed object's pieces, which follow the table of sizes; then the end of the last."""
    place = 8 * len(sizes)
    for size in sizes[1:]:
        place += -place % _ALIGNED
        yield place
        place += size
    yield place


class _Beside:
    """The file of a pickler: collects the pickle, and the buffers that are not in it.

    It has no reference to the pickler: the cycle would keep the pickler's memory until the garbage collector runs.
    """

    def __init__(self) -> None:
        self.packed: dict[pickle.PickleBuffer, str] = {}
        self.begin()

    def begin(self) -> None:
        self.pieces: list[bytes] = []
        self.buffers: list[memoryview] = []
        self.kinds: dict[int, str] = {}
        self.refs: dict[int, str] = {}
        self.packed.clear()

    def payload(self) -> Payload:
        return Payload(b"".join(self.pieces), self.buffers, self.refs or _NO_REFS, self.kinds or _NO_REFS)

    def __call__(self, buffer: pickle.PickleBuffer) -> bool:
        try:
            view = buffer.raw()
        except BufferError:  # not contiguous: pickle raises the error itself
            return True
        name = self.packed.get(buffer)
        if name is not None:
            self.refs[id(view)] = name
        elif view.nbytes < IN_BAND or len(self.buffers) - len(self.refs) >= BESIDE:
            return True
        self.buffers.append(view)
        return False

    def write(self, piece: bytes) -> None:
        """Takes large bytes and texts out of the pickle, which the pickler does only for other buffers.

        It writes them as they are, without a copy, and before them the opcode and their size.
        """
        if len(piece) >= LARGE and len(self.buffers) < BESIDE:
            for opcode, width, restore, kind in _OPCODES:
                if len(piece) >> 8 * width:
                    continue
                head = opcode + len(piece).to_bytes(width, "little")
                if self.pieces and self.pieces[-1].endswith(head):
                    call = f"c{__name__}\n{restore.__name__}\n".encode() + pickle.NEXT_BUFFER
                    self.pieces[-1] = self.pieces[-1].removesuffix(head) + call + pickle.TUPLE1 + pickle.REDUCE
                    view = memoryview(bytes(piece))  # a copy of a bytearray, which may change
                    self.buffers.append(view)
                    if kind:
                        self.kinds[id(view)] = kind
                    return
        self.pieces.append(piece)


def _bytearray(memory: Buffer) -> bytearray:
    return bytearray(memory)


def _str(memory: Buffer) -> str:
    return str(memory, "utf-8", "surrogatepass")


_OPCODES: Final = (
    (pickle.BINBYTES, 4, bytes_in, "bytes"),
    (pickle.BINBYTES8, 8, bytes_in, "bytes"),
    (pickle.BYTEARRAY8, 8, _bytearray, ""),
    (pickle.BINUNICODE, 4, _str, ""),
    (pickle.BINUNICODE8, 8, _str, ""),
)
"""The opcodes of large bytes and texts, how many bytes their size has, what restores them, and in which memory."""


def send_by_value(module: Any) -> None:
    """Pickles what this module defines by value, because hosts cannot import the module."""
    cloudpickle.register_pickle_by_value(module)


_MAKE_CLASS: Final = getattr(cloudpickle.cloudpickle, "_make_skeleton_class", None)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def __init__(self, beside: _Beside, reference: Reference | None, same_gpus: bool) -> None:
        self._reference = reference
        self._same_gpus = same_gpus
        self._packed = beside.packed
        self.storages: dict[int, _Storage] = {}
        torch = sys.modules.get("torch")
        self._typed = getattr(getattr(torch, "storage", None), "TypedStorage", None)
        self._untyped = getattr(torch, "UntypedStorage", None)
        self._rebuild = getattr(getattr(torch, "_utils", None), "_rebuild_tensor_v3", None)
        super().__init__(beside, protocol=5, buffer_callback=beside)

    def reducer_override(self, obj: Any) -> Any:
        if self._reference is not None and (found := self._reference(obj)) is not None:
            return found
        if isinstance(obj, BaseException):
            if _is_plain(type(obj)):
                reduced: Any = obj.__reduce__()
                return _exception, (type(obj), reduced[1], obj.args, *reduced[2:])
            if getattr(copyreg.dispatch_table.get(type(obj)), "__module__", "").startswith("tblib"):
                return obj.__reduce_ex__(5)  # other libraries install tblib, which the receiver may lack
        if type(obj) is functools._lru_cache_wrapper and not _is_importable(obj):
            return _cached, (obj.cache_parameters(),), obj.__wrapped__, None, None, functools.update_wrapper
        if isinstance(obj, Packed):
            return unpack, (self._referred(obj),)
        if self._untyped is not None:
            if type(obj) is self._typed:
                return _typed, (self._holder(obj._untyped_storage), obj.dtype)
            if type(obj) is self._untyped:
                return _same, (self._holder(obj),)
            if obj is self._rebuild:
                return _rebuilder, ()
        found = super().reducer_override(obj)
        if found is not NotImplemented and found[0] is _MAKE_CLASS and vars(obj).get("__slots__"):
            found[1][3]["__slots__"] = obj.__slots__  # cloudpickle 3.1 creates the class without them
        return found

    def _referred(self, packed: Packed) -> pickle.PickleBuffer:
        # Not of the view: Python 3.11 crashes when views of views are part of cyclic garbage.
        buffer = pickle.PickleBuffer(packed.memory.obj)
        self._packed[buffer] = packed.name
        return buffer

    def _holder(self, untyped: Any) -> _Storage:
        """One holder per storage, so that pickle's memo sends it once and restores the sharing."""
        return self.storages.setdefault(untyped._cdata, _Storage(untyped, self._same_gpus))


def _is_importable(function: Any) -> bool:
    """Whether hosts can import a function by its name."""
    by_value = {"__main__", *cloudpickle.cloudpickle.list_registry_pickle_by_value()}
    try:
        found = operator.attrgetter(function.__qualname__)(sys.modules[function.__module__])
    except (AttributeError, KeyError):
        return False
    return found is function and function.__module__ not in by_value


def _cached(parameters: dict[str, Any]) -> Any:
    """A function with an empty cache. Pickle then gives it the function to call, which may refer to it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return cached.__wrapped__(*args, **kwargs)

    cached = functools.lru_cache(**parameters)(call)
    return cached


def _is_plain(kind: type[BaseException]) -> bool:
    """Whether the class inherits pickling from a built-in exception.

    That calls the class's own constructor with `args`, which may not match its signature.
    """
    return (
        isinstance(kind.__init__, types.FunctionType)
        and isinstance(kind.__reduce__, types.MethodDescriptorType)
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__setstate__ is BaseException.__setstate__
    )


def _exception(
    kind: type[BaseException], made_from: tuple[Any, ...], args: tuple[Any, ...], *state: dict[str, Any]
) -> BaseException:
    """Restores an exception without calling its own constructor or `__setattr__`."""
    error = kind.__new__(kind, *made_from)
    builtin = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    try:
        builtin.__init__(error, *made_from)  # type: ignore[misc]  # some built-in types store more than `args`
    except TypeError:
        pass
    for name, value in {**(state[0] if state else {}), "args": args}.items():
        object.__setattr__(error, name, value)
    return error


class _Storage:
    """Stand-in for a torch storage while it is pickled."""

    __slots__ = ("_same_gpus", "_shared", "untyped")

    def __init__(self, untyped: Any, same_gpus: bool) -> None:
        self.untyped = untyped
        self._same_gpus = same_gpus
        self._shared: tuple[Any, ...] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self._same_gpus and self.untyped.device.type == "cuda" and self.untyped.nbytes() >= LARGE:
            from skyfab.protocol.same_gpus import received, share

            self._shared = share(self.untyped)
            if self._shared is not None:
                return received, self._shared
        untyped = self.untyped if self.untyped.device.type == "cpu" else self.untyped.cpu()
        if not untyped.nbytes():
            return _storage, (b"", str(self.untyped.device))
        return _storage, (pickle.PickleBuffer(_mapped(untyped, untyped.nbytes())), str(self.untyped.device))

    def release(self) -> None:
        """The pickle is not sent."""
        if self._shared is not None:
            from skyfab.protocol.same_gpus import release

            release(self._shared)


def tensor_memory(tensor: Any) -> memoryview:
    """The memory of a contiguous tensor on the CPU. Raises ValueError for a tensor elsewhere."""
    if not tensor.is_cpu:
        raise ValueError(f"a tensor on {tensor.device} has no memory in this process")
    size = tensor.numel() * tensor.element_size()
    return memoryview(_mapped(tensor, size)).cast("B") if size else memoryview(b"")


def _mapped(owner: Any, size: int) -> Any:
    import ctypes  # only when there are tensors: importing it would slow an agent's start

    memory: Any = (ctypes.c_ubyte * size).from_address(owner.data_ptr())
    memory.owner = owner  # keeps it alive as long as the buffer
    return memory


def torch_device(device: str) -> str:
    """Where a tensor of that device is restored: on a GPU of this machine if there is one."""
    import torch

    if device.startswith("cuda") and torch.cuda.is_available():
        index = int(device.partition(":")[2] or 0)
        return f"cuda:{index if index < torch.cuda.device_count() else 0}"
    return "cpu"


def _storage(memory: Any, device: str) -> Any:
    import torch

    place = torch_device(device)
    if not len(memory):
        return torch.UntypedStorage(0, device=place)
    return torch.frombuffer(memory, dtype=torch.uint8).to(place).untyped_storage()


def _typed(untyped: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _same(untyped: Any) -> Any:
    return untyped


def _rebuilder() -> Any:
    """Replaces torch's own function, which takes dtypes without typed storage (uint16, float8) in `torch.save` only."""
    return _rebuild_v3


def _rebuild_v3(storage: Any, *rest: Any) -> Any:
    import torch

    return torch._utils._rebuild_tensor_v3(_typed(storage, torch.uint8), *rest)
