"""Changes to PyTorch's own methods, for what it cannot do with tensors that have no memory in this process."""

from __future__ import annotations

import functools
import threading
from typing import Any, Final

import torch

from skyfab.device import arguments, manual_kernels, plans, tensors
from skyfab.device.tensors import TYPE
from skyfab.host.device import wire


def apply() -> None:
    """Applies all of them, once."""
    tensor = torch.Tensor
    tensor.__deepcopy__ = _deepcopy(tensor.__deepcopy__)
    torch.nn.Parameter.__deepcopy__ = _deepcopy(torch.nn.Parameter.__deepcopy__)
    tensor.__reduce_ex__ = _reduce(tensor.__reduce_ex__)
    tensor.new_tensor = _on_own_device(tensor.new_tensor)
    tensor.new = _on_own_device(tensor.new)
    tensor.pin_memory = _pinned(tensor.pin_memory)
    tensor.__repr__ = _printed(tensor.__repr__)
    torch.Generator = _Generator
    for module in (torch.autograd, torch.autograd.graph):
        module._engine_run_backward = _raising_again(module._engine_run_backward)
    torch.save = torch.serialization.save = _saving(torch.save)  # in both places: so it is pickled by name
    for name in ("set_default_dtype", "set_default_tensor_type"):
        setattr(torch, name, _sending_dtype(getattr(torch, name)))
    for name in ("set_float32_matmul_precision", "use_deterministic_algorithms", "set_deterministic_debug_mode"):
        setattr(torch, name, _sending_settings(getattr(torch, name)))
    torch.serialization.register_package(5, lambda storage: None, _restored)
    for name in ("__deepcopy__", "__getitem__", "__setitem__", "byteswap", "clone", "copy_", "cpu", "fill_", "tolist"):
        setattr(torch.UntypedStorage, name, _needs_memory(getattr(torch.UntypedStorage, name)))
    torch.UntypedStorage._new_shared = staticmethod(_unshared(torch.UntypedStorage._new_shared))


def _is_plain(value: Any) -> bool:
    """Whether it is a remote tensor, and none of another type that only speaks of one, as in torch.compile."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == TYPE


def _deepcopy(original: Any) -> Any:
    """Copies on the device. Tensors that share a storage share the copy's."""

    @functools.wraps(original)
    def deepcopy(self: Any, memo: dict[Any, Any]) -> Any:
        if not _is_plain(self) or not self.is_leaf:
            return original(self, memo)
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            key = ("skyfab storage", self.device.index, self.untyped_storage().data_ptr())
            whole = memo.get(key)
            if whole is None:
                size = self.untyped_storage().nbytes() // self.element_size()
                whole = memo[key] = self.detach().as_strided((size,), (1,), 0).clone()
            flat = whole if whole.dtype == self.dtype else whole.view(self.dtype)
            copy = flat.as_strided(self.shape, self.stride(), self.storage_offset())
        if type(self) is torch.nn.Parameter:
            copy = torch.nn.Parameter(copy, self.requires_grad)
        else:
            copy.requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        if self.grad is not None:
            copy.grad = self.grad.__deepcopy__(memo)
        return copy

    return deepcopy


class _Saving(threading.local):
    """What `torch.save` has copied from devices so far, on a thread that is in it: storages, by address and dtype."""

    copied: dict[Any, torch.Tensor] | None = None


_now: Final = _Saving()


def _saving(original: Any) -> Any:
    """Copies each storage once: tensors that share one share it in the file too."""

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        before, _now.copied = _now.copied, {}
        try:
            return original(*args, **kwargs)
        finally:
            _now.copied = before

    return save


def _copy_here(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in this machine's memory; in `torch.save`, a view of the copy of its storage."""
    if _now.copied is None or not tensor.numel() or tensor.is_conj() or tensor.is_neg():
        return manual_kernels.fetch(tensor)
    storage = tensor.untyped_storage()
    key = (storage.data_ptr(), tensor.dtype)  # a file has one dtype for each storage
    if key not in _now.copied:
        size = storage.nbytes() // tensor.element_size()
        _now.copied[key] = manual_kernels.fetch(tensor.detach().as_strided((size,), (1,), 0))
    return _now.copied[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _reduce(original: Any) -> Any:
    """Pickles the values: a pickle outlives the device."""

    @functools.wraps(original)
    def reduce_ex(self: Any, protocol: Any) -> Any:
        if not _is_plain(self):
            return original(self, protocol)
        here = _copy_here(self)
        if type(self) is torch.nn.Parameter:
            return torch.nn.Parameter(here, self.requires_grad).__reduce_ex__(protocol)
        return original(here.requires_grad_(self.requires_grad), protocol)

    return reduce_ex


def _restored(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """What ``torch.load(…, map_location=device)`` has read, on the device."""
    if location.partition(":")[0] != TYPE:
        return None
    here = torch.empty(0, dtype=torch.uint8).set_(storage)
    return here.to(location).untyped_storage()


def _needs_memory(original: Any) -> Any:
    """Refuses to read or write the memory of a remote storage: nothing is at its address."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == TYPE:
            raise RuntimeError(
                f"the memory of a storage on {self.device} is on its host: copy the tensor, not its storage"
            )
        return original(self, *args, **kwargs)

    return method


def _unshared(original: Any) -> Any:
    """Refuses to make remote memory that processes share, as a data loader's workers would for their batches."""

    @functools.wraps(original)
    def new_shared(size: int, *, device: Any = "cpu") -> Any:
        if torch.device(device).type == TYPE:
            raise RuntimeError(f"processes cannot share memory on {device}: load data on this machine's CPU")
        return original(size, device=device)

    return new_shared


def _on_own_device(original: Any) -> Any:
    """Makes the new tensor on the device of the old one: PyTorch would use the current device."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_plain(self) and kwargs.get("device") is None:
            kwargs["device"] = self.device
        return original(self, *args, **kwargs)

    return method


def _pinned(original: Any) -> Any:
    """Does nothing with tensors of this machine, whose memory an upload copies anyway, and refuses remote ones."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == TYPE:
            raise RuntimeError(
                f"cannot pin a tensor on {self.device}: only tensors in this machine's memory can be pinned"
            )
        return self if tensors.streams else original(self, *args, **kwargs)

    return method


def _sending_dtype(original: Any) -> Any:
    """Sends hosts the default dtype. Plans depend on it: they are made again."""

    @functools.wraps(original)
    def function(kind: Any) -> None:
        before = torch.get_default_dtype()
        original(kind)
        if torch.get_default_dtype() is not before:
            plans.forget_plans(settings())

    return function


def settings() -> list[Any]:
    """The instruction that sends a host the settings of this program."""
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch.backends was used too, and they differ
        precision = ""
    dtype = tensors.DTYPE_NUMBERS[torch.get_default_dtype()]
    return [wire.SETTINGS, dtype, precision, torch.get_deterministic_debug_mode()]


def _sending_settings(original: Any) -> Any:
    """Sends hosts what was set."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        for stream in tensors.streams:
            stream.emit_always(settings())

    return function


def _printed(original: Any) -> Any:
    """Prints the values with one wait in place of several."""

    @functools.wraps(original)
    def shown(self: Any, *, tensor_contents: str | None = None) -> str:
        if not _is_plain(self) or tensor_contents is not None:
            return str(original(self, tensor_contents=tensor_contents))
        here = manual_kernels.fetch(self)
        text = str(original(here))
        suffix = f", device='{self.device}'"
        if self.grad_fn is not None:
            suffix += f", grad_fn=<{type(self.grad_fn).__name__}>"
        elif self.requires_grad:
            suffix += ", requires_grad=True"
        return f"{text[:-1]}{suffix})" if text.endswith(")") else text

    return shown


_OwnGenerator: Any = torch.Generator


class _AnyGenerator(type(_OwnGenerator)):  # type: ignore[misc]
    """Generators of this machine are instances too."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _OwnGenerator)


class _Generator(_OwnGenerator, metaclass=_AnyGenerator):  # type: ignore[misc]
    """`torch.Generator` for remote devices too."""

    remote_id: int

    def __new__(cls, device: Any = "cpu") -> Any:
        device = torch.device(device)
        if device.type != TYPE:
            return _OwnGenerator(device)
        made = _OwnGenerator.__new__(cls, "cpu")
        stream = tensors.streams[device.index or 0]
        made.remote_id = tensors.new_id()
        made.stream = stream
        arguments.remote_generators[made._cdata] = (made.remote_id, stream.index)
        stream.emit([wire.GENERATOR, made.remote_id])
        return made

    def __init__(self, device: Any = "cpu") -> None:
        pass

    def __del__(self) -> None:
        if arguments.remote_generators.pop(self._cdata, None) is not None:
            self.stream.freed.append(self.remote_id)

    @property
    def device(self) -> torch.device:
        return torch.device(TYPE, self.stream.index)

    def manual_seed(self, seed: int) -> Any:
        self.stream.emit([wire.SEED, seed % (1 << 64), self.remote_id])
        return super().manual_seed(seed)

    def get_state(self) -> torch.Tensor:
        return manual_kernels.random_state(self.stream, self.remote_id)

    def set_state(self, new_state: torch.Tensor) -> Any:
        manual_kernels.set_random_state(self.stream, self.remote_id, new_state)
        return self


class _Raised(threading.local):
    """What a hook has raised in a backward of a thread, while PyTorch does not know it any more."""

    error: BaseException | None = None


raised: Final = _Raised()


def _raising_again(original: Any) -> Any:
    """Raises what a hook has raised."""

    @functools.wraps(original)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except SystemError:
            error, raised.error = raised.error, None
            if error is None:
                raise
        raise error  # not in the clause: it keeps its own context

    return run_backward


def explain_own_backward(name: str) -> None:
    """Turns PyTorch's assertion in a backward over the machine's own accelerator into an explanation."""
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except RuntimeError as error:
            if "opt_ready_stream" not in str(error):
                raise
            raise RuntimeError(
                f"backward() over tensors on {name} is not possible in a process with a remote device: PyTorch has one "
                "accelerator in a process. Train on this machine's own GPU in another process."
            ) from error

    torch.autograd.backward = backward
