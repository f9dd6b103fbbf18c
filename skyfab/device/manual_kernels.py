"""Kernels that are not generated: memory, views, copies, values, and random numbers."""

from __future__ import annotations

import functools
import itertools
import operator
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

import torch

from skyfab.device import p2p_client, tensors
from skyfab.device.arguments import is_recorded, refuse_overlap
from skyfab.device.batches import Batch
from skyfab.device.kernels import make_kernel
from skyfab.device.stream import DeviceFuture, DeviceStream
from skyfab.device.tensors import DTYPE_NUMBERS, TYPE, index_of, is_remote, layout_of, operand, stream_of
from skyfab.errors import ProtocolError
from skyfab.host.device import wire
from skyfab.protocol import codec
from skyfab.protocol.blobs import LARGE, allocate

_aten: Final = torch.ops.aten
_ONE_TENSOR: Final = 2
"""Uses of a storage that has one tensor: the tensor's, and that of Python's object for the storage."""


def kernels() -> dict[str, Callable[..., Any]]:
    """All of them, by operator."""
    return {
        "as_strided": _as_strided,
        "_reshape_alias": _as_strided,
        "view": like_cpu(_aten.view.default),
        "unfold": like_cpu(_aten.unfold.default),
        "view_as_real": like_cpu(_aten.view_as_real.default),
        "view_as_complex": like_cpu(_aten.view_as_complex.default),
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "copy_": _copy,
        "clone": _clone,
        "_to_copy": _to_copy,
        "_efficientzerotensor": torch.zeros,  # an ordinary tensor: the host has no other ones
        # PyTorch asks before it assigns `data`: a module that moves between devices keeps its parameters
        "_has_compatible_shallow_copy_type": lambda self, other: self.layout == other.layout,
        # PyTorch asks before it makes a nested one
        "_nested_tensor_from_mask_left_aligned": lambda padded, mask: False,
        "_local_scalar_dense": _item,
        "_embedding_bag_backward": _bag_gradient,
        "histc": _histc,
        "resize_": _resize,
        "set_.source_Storage_storage_offset": like_cpu(_aten.set_.source_Storage_storage_offset),
        "set_.source_Tensor": like_cpu(_aten.set_.source_Tensor),
        "set_.source_Storage": like_cpu(_aten.set_.source_Storage),
    }


def like_cpu(op: Any, key: Any = torch._C.DispatchKey.CPU) -> Callable[..., Any]:
    """PyTorch's kernel for the CPU, for operators that change only what a tensor says about its memory."""
    call = op._handle.redispatch_boxed
    keys = torch._C.DispatchKeySet(key)
    return lambda *args, **kwargs: call(keys, *args, **kwargs)


# ---- memory and views


class _Unnamed(threading.local):
    """The index of the device that PyTorch means where it names none, as for parts of sparse tensors."""

    index = 0


unnamed: Final = _Unnamed()


def _stream(device: torch.device | None) -> DeviceStream:
    return tensors.streams[unnamed.index if device is None or device.index is None else device.index]


def _empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    memory_format: torch.memory_format | None = None,
    **_: Any,  # layout and pin_memory: they mean nothing here, and below
) -> torch.Tensor:
    if memory_format is None or memory_format is torch.contiguous_format:
        return _empty_strided(size, _contiguous(tuple(size)), dtype=dtype, device=device)
    meta = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format)
    return _empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device)


@functools.lru_cache(1024)
def _contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides = itertools.accumulate((max(length, 1) for length in reversed(size[1:])), operator.mul, initial=1)
    return tuple(strides)[::-1] if size else ()


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> torch.Tensor:
    stream = _stream(device)
    found = layout_of(tuple(size), tuple(stride), dtype or torch.get_default_dtype(), stream.index)
    tensor, ident = found.new()
    stream.emit([wire.EMPTY, ident, found.shape, found.stride, DTYPE_NUMBERS[found.dtype]])
    return tensor


def _as_strided(self: torch.Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> torch.Tensor:
    """Half the time of `like_cpu`, which converts the numbers twice."""
    result = self.detach()
    result.as_strided_(size, stride, self.storage_offset() if storage_offset is None else storage_offset)
    return result


def _resize(self: torch.Tensor, size: Sequence[int], *, memory_format: Any = None) -> torch.Tensor:
    if tuple(size) != self.shape:
        meta = torch.empty(size, device="meta")
        storage, offset = self.untyped_storage(), self.storage_offset()
        if meta.numel() and (offset + meta.numel()) * self.element_size() > storage.nbytes():
            storage = _larger(storage, (offset + meta.numel()) * self.element_size(), self.device)
        self.set_(storage, offset, meta.shape, meta.stride())
    if memory_format is not None:
        meta = torch.empty(size, device="meta").to(memory_format=memory_format)
        self.as_strided_(meta.shape, meta.stride())
    return self


def _larger(storage: torch.UntypedStorage, size: int, device: torch.device) -> torch.UntypedStorage:
    """A new storage of `size` bytes that begins with those of another one, which must have one tensor only."""
    if torch._C._storage_Use_Count(storage._cdata) > _ONE_TENSOR:
        raise RuntimeError(f"a tensor on {device} cannot grow while others share its memory: resize_ a clone of it")
    new = torch.empty(size, dtype=torch.uint8, device=device)
    if storage.nbytes():
        new[: storage.nbytes()].copy_(whole(storage))
    return new.untyped_storage()


def whole(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# ---- copies and values

_copy_kernel: Final = make_kernel(_aten.copy_.default)
_clone_kernel: Final = make_kernel(_aten.clone.default)
_to_copy_kernel: Final = make_kernel(_aten._to_copy.default)


def _copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if self is source:
        return self
    if not is_remote(self):
        return self.copy_(fetch(source))
    if self.is_conj():
        _copy(self.conj(), source.conj())
        return self
    if self.is_neg():
        _copy(self._neg_view(), -source.to(self.dtype))
        return self
    refuse_overlap(self)
    if is_remote(source):
        source = source.resolve_conj().resolve_neg()
        if index_of(source) == index_of(self):
            return _copy_kernel(self, source, non_blocking)
        if channel := p2p_client.channel_between(stream_of(source), stream_of(self)):
            p2p_client.copy(channel, self, source)
            return self
        source = fetch(source)
    if self.numel():
        data = snapshot(source, self.shape, self.dtype)
        stream_of(self).upload((wire.UPLOAD, operand(self)[1]), data, recorded=is_recorded((self, source)))
    return self


def snapshot(source: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> memoryview:
    """The elements of a tensor of this machine in memory that nothing else writes to."""
    size = shape.numel() * dtype.itemsize
    if size < LARGE:
        copy = torch.empty(shape, dtype=dtype, device="cpu")
    else:  # in huge pages, which halves the time
        copy = torch.frombuffer(allocate(size), dtype=torch.uint8).view(dtype).view(shape)
    return codec.tensor_memory(copy.copy_(source))


def _clone(self: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    is_new = self.is_conj() or self.is_neg()
    if is_new:
        self = _aten._conj_physical(self.conj()) if self.is_conj() else _aten.neg(self._neg_view())
    if memory_format is None or (is_new and memory_format is torch.preserve_format):
        return self if is_new else _clone_kernel(self)
    return _clone_kernel(self, memory_format=memory_format)


def _to_copy(
    self: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    memory_format: torch.memory_format | None = None,
    **_: Any,
) -> torch.Tensor:
    """``Tensor.to``. A conversion on the device is one instruction; a copy to another device is written there."""
    self = self.resolve_conj().resolve_neg()
    memory_format = memory_format or torch.preserve_format
    device = device or self.device
    if is_remote(self) and device.type == TYPE and (device.index or 0) == index_of(self):
        return _to_copy_kernel(self, dtype=dtype or self.dtype, memory_format=memory_format)
    if device.type == TYPE and self.is_cpu and self.is_contiguous() and self.numel() and memory_format in _AS_IS:
        return _make(self, dtype or self.dtype, device)
    meta = torch.empty_strided(self.size(), self.stride(), dtype=dtype or self.dtype, device="meta")
    meta = torch.empty_like(meta, memory_format=memory_format)
    if is_remote(self) and device.type == TYPE and self.numel():
        stream = _stream(device)
        if channel := p2p_client.channel_between(stream_of(self), stream):
            made = layout_of(tuple(meta.shape), meta.stride(), meta.dtype, stream.index).new()[0]
            p2p_client.copy(channel, made, self, is_new=True)
            return made
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device).copy_(self)


_AS_IS: Final = (torch.preserve_format, torch.contiguous_format)


def _make(source: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor on a device, of one on this machine."""
    stream = _stream(device)
    data = snapshot(source, source.shape, dtype)
    layout = layout_of(tuple(source.shape), source.stride(), dtype, stream.index)
    tensor, ident = layout.new()
    stream.upload((wire.MAKE, ident, layout.shape, DTYPE_NUMBERS[dtype]), data)
    return tensor


def fetch(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in this machine's memory. Waits for it."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return _copied(tensor, stream_of(tensor).ask([wire.FETCH, operand(tensor)[1]]))


def fetch_later(tensor: torch.Tensor) -> Future[torch.Tensor]:
    """Starts to copy a tensor to this machine's memory."""
    if not is_remote(tensor):
        copied: Future[torch.Tensor] = Future()
        copied.set_result(tensor.detach().clone())
        return copied
    future = DeviceFuture(stream_of(tensor))
    future.set_running_or_notify_cancel()
    tensor = tensor.detach().resolve_conj().resolve_neg()

    def arrived(batch: Batch, error: Exception | None) -> None:
        try:
            if error is not None:
                raise error
            future.set_result(_copied(tensor, batch))
        except Exception as found:
            future.set_exception(found)

    stream_of(tensor).start([wire.FETCH, operand(tensor)[1]], then=arrived)
    return future


def _copied(tensor: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The copy that a host sent."""
    batch.value()
    result = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    fill(result, batch.buffers)
    return result


def fill(result: torch.Tensor, buffers: Sequence[memoryview]) -> None:
    """Writes what a host sent into a new tensor. Raises ProtocolError if it is not as long as that."""
    memory = codec.tensor_memory(result)
    if len(buffers) != 1 or len(buffers[0]) != len(memory):
        raise ProtocolError(f"a device sent {[*map(len, buffers)]} bytes for a tensor of {len(memory)}")
    memory[:] = buffers[0]


def _item(self: torch.Tensor) -> Any:
    return fetch(self).item()


_histc_kernel: Final = make_kernel(_aten.histc.default)


def _histc(self: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:  # noqa: A002
    """CPUs count only floating-point numbers; programs that see a device other than the CPU count integers."""
    if stream_of(self).device == "cpu" and not self.is_floating_point():
        return _histc_kernel(self.double(), bins, min, max).to(self.dtype)
    return _histc_kernel(self, bins, min, max)


_dense_bag_gradient: Final = make_kernel(_aten._embedding_bag_backward.default)
_sparse_bag_gradient: Final = like_cpu(_aten._embedding_bag_backward.default)
_IS_SPARSE: Final = 9
"""The index of that argument."""


def _bag_gradient(*args: Any) -> torch.Tensor:
    """A sparse gradient is made of dense tensors here: a plan has dense results."""
    found: torch.Tensor = (_sparse_bag_gradient if args[_IS_SPARSE] else _dense_bag_gradient)(*args)
    return found
