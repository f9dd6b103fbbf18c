"""Remote tensors as the client has them: ordinary `torch.Tensor` objects without memory in this process.

Each has an address at which there is no memory, by which its storage is found (storages.py), and an id on the host.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch

from skyfab._util.signals import SIGNAL_GUARD
from skyfab.device.batches import current
from skyfab.device.storages import RemoteStorage, by_address
from skyfab.device.stream import DeviceStream
from skyfab.device.stream import streams as streams
from skyfab.errors import ProtocolError
from skyfab.host.device import wire
from skyfab.host.device.memory import DTYPE_NUMBERS as DTYPE_NUMBERS
from skyfab.host.device.memory import DTYPES

TYPE: Final = "sky"
"""The name of the device type in torch."""
_MOST_VIEWS: Final = 4096
"""Views of one storage that the host keeps; then the older half is dropped, and made again when it is used."""
_FIRST_ADDRESS: Final = 1 << 58
_LARGEST: Final = 1 << 48
_MOST_DIMENSIONS: Final = 64
"""Limits of a layout in a reply: PyTorch aborts the process where numbers of bytes overflow."""
_ADDRESSES: Final = 64
_LARGE: Final = 1 << 24
"""How many addresses a layout takes at once, unless its tensors are larger than `_LARGE`."""
_DLPACK_DEVICE: Final = 12
"""DLPack's number for the device type that torch maps to PrivateUse1."""
_SCALARS: Final = {dtype: ((wire.SCALAR_TENSOR, dtype), number) for dtype, number in DTYPE_NUMBERS.items()}


class _DLTensor(ctypes.Structure):
    """DLPack's DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
_name: Final = ctypes.create_string_buffer(b"dltensor")
_NAME: Final = ctypes.addressof(_name)
_from_dlpack = torch._C._from_dlpack

new_id: Final = itertools.count(1).__next__
new_block: Final = itertools.count(1 << 40, wire.BLOCK).__next__
"""The first of many ids that the host may use: for results of which only the host knows how many there are."""
_lock = threading.Lock()
_next_address = _FIRST_ADDRESS


_Slot = tuple[int, ctypes.c_uint64]
"""The address of a DLPack structure, and the word in it that has the tensor's address."""


class Layout:
    """Shape, strides and dtype of a tensor on one device, with the DLPack structures that make such tensors."""

    __slots__ = ("_addresses", "_dead", "_index", "_keep", "_slots", "dtype", "nbytes", "shape", "stream", "stride")

    def __init__(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, index: int) -> None:
        self.shape = shape
        self.stride = stride
        self.dtype = dtype
        self.stream = streams[index]
        if dtype not in DTYPE_NUMBERS:
            raise TypeError(f"{TYPE}:{index} does not support tensors of {dtype}")
        self._index = index
        extent = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        self.nbytes = extent * dtype.itemsize
        self._dead = self.stream.dead.append
        self._addresses: Iterator[int] = iter(())
        self._slots: list[_Slot] = []
        """Those that no thread uses just now."""
        sizes = ctypes.c_int64 * max(len(shape), 1)
        self._keep: list[Any] = [sizes(*shape), sizes(*stride)]
        """The memory that the structures are in: PyTorch reads it again when it frees a tensor."""

    def new(self, ident: int = 0) -> tuple[torch.Tensor, int]:
        """A new tensor of this layout, and its id, which may be given. The host knows nothing of it yet."""
        address = next(self._addresses, 0) or self._next_address()
        try:
            slot = self._slots.pop()
        except IndexError:
            slot = self._new_slot()
        struct, data = slot
        data.value = address
        tensor = _from_dlpack(_capsule(struct, _NAME, None))
        self._slots.append(slot)
        storage = RemoteStorage(tensor.untyped_storage(), self._dead)
        storage.address = address
        storage.id = ident = ident or new_id()
        storage.layout = self
        storage.views = None
        by_address[address] = storage  # last: Ctrl-C may come between any two lines
        return tensor, ident

    def _next_address(self) -> int:
        """Takes a range of addresses, and returns the first of them."""
        global _next_address
        step = (self.nbytes + 1023) & ~511
        count = _ADDRESSES if step < _LARGE else 1
        with _lock:
            first = _next_address
            _next_address = first + count * step
        self._addresses = iter(range(first + step, first + count * step, step))
        return first

    def _new_slot(self) -> _Slot:
        struct = _DLTensor()
        struct.device_type, struct.device_id, struct.ndim = _DLPACK_DEVICE, self._index, len(self.shape)
        struct.code, struct.bits = wire.DTYPES[str(self.dtype).removeprefix("torch.")], 8 * self.dtype.itemsize
        struct.lanes = 1
        struct.shape, struct.strides = map(ctypes.addressof, self._keep[:2])
        self._keep.append(struct)
        address = ctypes.addressof(struct)
        return address, ctypes.c_uint64.from_address(address)


_layouts: Final[dict[tuple[Any, ...], Layout]] = {}


def layout_of(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, index: int) -> Layout:
    """The layout; equal ones are one object."""
    key = (shape, stride, dtype, index)
    found = _layouts.get(key)
    if found is None:
        found = _layouts[key] = Layout(*key)
    return found


def has_tensors(stream: DeviceStream) -> bool:
    """Whether the program still has tensors of a device."""
    stream.take_freed()
    return any(storage.layout.stream is stream for storage in list(by_address.values()))


def forget_layouts(index: int) -> None:
    """The device of that index is another one now."""
    for key in [key for key in _layouts if key[3] == index]:
        del _layouts[key]


def is_remote(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == TYPE


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor itself, and not of a type that only describes one, as in torch.compile."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


def index_of(tensor: torch.Tensor) -> int:
    return tensor.device.index or 0


def stream_of(tensor: torch.Tensor) -> DeviceStream:
    return streams[index_of(tensor)]


def operand(tensor: torch.Tensor) -> tuple[Any, Any]:
    """What an instruction has instead of a tensor, and its layout, for any tensor; kernels have a faster way.

    A tensor without dimensions that is in this process's memory is sent by value. Raises RuntimeError for others.
    """
    offset = tensor.storage_offset() * tensor.element_size()
    storage = by_address.get(tensor.data_ptr() - offset)
    if storage is not None:
        return view(tensor, storage, offset)
    if tensor.device.type != TYPE:
        if tensor.dim():
            raise RuntimeError(
                f"expected all tensors to be on a {TYPE} device, found one of shape {list(tensor.shape)} "
                f"on {tensor.device}: move it with .to(device)"
            )
        kind, number = _SCALARS[tensor.dtype]
        return kind, (number, tensor.item())
    return view(tensor, by_address[tensor.untyped_storage().data_ptr()], offset)  # without elements: at no address


def view(tensor: torch.Tensor, storage: RemoteStorage, offset: int) -> tuple[Layout, int]:
    """The layout and id of a tensor that is a view of a storage, at an offset in bytes. The host learns of new ones."""
    key = (tensor.shape, tensor.stride(), tensor.dtype, offset)
    views = storage.views
    if views is None:
        views = storage.views = {}
    found = views.get(key)
    if found is None:
        stream = storage.layout.stream
        if len(views) >= _MOST_VIEWS:
            for old in list(itertools.islice(views, _MOST_VIEWS // 2)):
                ident = views.pop(old)[1]
                if ident != storage.id:
                    stream.stale.append((current.thread, ident))
        layout = layout_of(tuple(key[0]), key[1], key[2], stream.index)
        if layout is storage.layout and not offset:
            found = views[key] = (layout, storage.id)
        else:
            found = (layout, new_id())
            number = DTYPE_NUMBERS[layout.dtype]
            at = offset // layout.dtype.itemsize
            with SIGNAL_GUARD:  # else Ctrl-C would leave a view on the host that is never freed
                stream.emit([wire.VIEW, found[1], storage.id, layout.shape, layout.stride, at, number])
                views[key] = found
    return found


def operands(tensors: Any, into: list[Any]) -> tuple[Any, ...]:
    """Appends the operands of a list of tensors; returns their layouts."""
    found: list[Any] = []
    for tensor in tensors:
        if tensor is None:
            found.append(None)
            continue
        storage = by_address.get(tensor.data_ptr())
        if (
            storage is not None
            and tensor.shape == (layout := storage.layout).shape
            and tensor.stride() == layout.stride
            and tensor.dtype is layout.dtype
        ):
            found.append(layout)
            into.append(storage.id)
        else:
            layout, ident = operand(tensor)
            found.append(layout)
            into.append(ident)
    return tuple(found)


# ---- results that hosts describe


ITERATOR: Final = {"iterator": None}
"""What a host replies for a generator."""


Given = Mapping[int, torch.Tensor]
"""The tensors that a function on the host is called with, by id."""
_NOTHING: Final = MappingProxyType[int, torch.Tensor]({})


def result_of(
    stream: DeviceStream, instruction: Sequence[Any], first: int, *uploads: memoryview, given: Given = _NOTHING
) -> Any:
    """Sends an instruction whose results stay on the host, with ids from `first` on, and waits for them.

    Returns ITERATOR for a generator. Raises the error of an earlier instruction, DeviceError and ProtocolError.
    """
    try:
        batch = stream.start(instruction, *uploads)
        try:
            value = stream.receive(batch).value()
        finally:
            note_changes(given, (batch.document or {}) if batch.is_there else None)
        return ITERATOR if value == ITERATOR else restore(value, first, stream.index, given)
    except BaseException:  # also Ctrl-C: the host may have results that will not be used
        stream.freed.append(-first)
        raise


def note_changes(given: Given, document: Any) -> None:
    """Autograd learns which of these tensors a function has changed in place: all of them, if the reply is unknown."""
    found = document.get("changed", ()) if isinstance(document, dict) else given
    changed = {ident for ident in found if type(ident) is int} if isinstance(found, list) else found
    torch.autograd.graph.increment_version(
        [tensor for ident, tensor in given.items() if ident in changed and not tensor.is_inference()]
    )


def restore(document: Any, first: int, index: int, given: Given = _NOTHING) -> Any:
    """The value that a host describes; its tensors stay on the host, with ids from `first` on. Raises ProtocolError.

    Those that are parts of `given` ones become views of these.
    """
    try:
        return _restore(document, first, index, {~ident: tensor for ident, tensor in given.items()})
    except (AttributeError, IndexError, KeyError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise ProtocolError(f"invalid result of a device: {document!r:.200}") from error


def _restore(document: Any, first: int, index: int, bases: dict[int, torch.Tensor]) -> Any:
    ((kind, value),) = document.items()
    if kind == "tensor":
        number, shape, stride, dtype, view = value
        if type(number) is not int or number >= wire.BLOCK:
            raise ValueError("invalid number of a base")
        if number < 0:
            return view_of(bases[number], view)
        layout = _layout(shape, stride, dtype, index)
        if number not in bases:
            bases[number] = layout.new(first + number)[0]
        base = bases[number]
        if by_address[base.untyped_storage().data_ptr()].layout is not layout:
            raise ValueError("a base with two layouts")
        return base if view is None else view_of(base, view)
    if kind == "plain":
        return value
    if kind == "complex":
        return complex(*value)
    if kind == "dict":
        return {_restore(key, first, index, bases): _restore(item, first, index, bases) for key, item in value}
    if kind in ("tuple", "list"):
        return (tuple if kind == "tuple" else list)(_restore(item, first, index, bases) for item in value)
    raise ValueError(f"unknown kind of value: {kind!r:.80}")


def _layout(shape: Sequence[int], stride: Sequence[int], number: int, index: int) -> Layout:
    """A layout in a reply. Raises ValueError."""
    if not all(type(n) is int and 0 <= n <= _LARGEST for n in (*shape, *stride, number)):
        raise ValueError("invalid numbers in a layout")
    if len(shape) != len(stride) or len(shape) > _MOST_DIMENSIONS or math.prod(max(n, 1) for n in shape) > _LARGEST:
        raise ValueError("invalid layout")
    if sum(n * s for n, s in zip(shape, stride, strict=True)) > _LARGEST:
        raise ValueError("a tensor larger than any memory")
    return layout_of(tuple(shape), tuple(stride), DTYPES[number], index)


def view_of(base: torch.Tensor, view: Sequence[Any]) -> torch.Tensor:
    """A view of a base as a reply has it (host_results.py): shape, strides, offset, dtype. Raises ValueError."""
    shape, stride, offset, number = view
    layout = _layout(shape, stride, number, index_of(base))
    storage, size = base.untyped_storage(), layout.dtype.itemsize
    if type(offset) is not int or not 0 <= offset <= _LARGEST or offset * size + layout.nbytes > storage.nbytes():
        raise ValueError("a view outside of its base")
    flat = base.detach()  # with the base's count of changes, as views have it
    if base.dtype is not layout.dtype:
        flat = flat.as_strided((storage.nbytes() // size * size // base.element_size(),), (1,), 0).view(layout.dtype)
    return flat.detach().as_strided_(layout.shape, layout.stride, offset)
