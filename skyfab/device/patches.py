"""Changes to PyTorch's own methods, for what it cannot do with tensors that have no memory in this process."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from typing import Any, Final

import torch

from skyfab._util.signals import SIGNAL_GUARD
from skyfab.device import arguments, manual_kernels, plans, tensors, torch_sky
from skyfab.device.tensors import TYPE
from skyfab.host.device import wire

_SETTERS: Final = (
    "set_default_dtype",
    "set_default_tensor_type",
    "set_float32_matmul_precision",
    "use_deterministic_algorithms",
    "set_deterministic_debug_mode",
)
"""Functions that set what hosts must have too."""


def apply() -> None:
    """Applies all of them, once."""
    tensor = torch.Tensor
    tensor.new_tensor = _on_own_device(tensor.new_tensor)
    tensor.new = _on_own_device(tensor.new)
    tensor.pin_memory = _pinned(tensor.pin_memory)
    torch._tensor_str._tensor_str = _printed(torch._tensor_str._tensor_str)
    torch.Generator = _Generator
    for module in (torch.autograd, torch.autograd.graph):
        module._engine_run_backward = _raising_again(module._engine_run_backward)
    torch.accelerator.synchronize = _synchronize
    for module in (torch.accelerator, torch.accelerator.memory):
        module.memory_stats, module.get_memory_info, module.empty_cache = _memory_stats, _memory_info, _empty_cache
    for name in _SETTERS:
        setattr(torch, name, _sending_settings(getattr(torch, name)))
    torch.serialization.register_package(5, _location, _restored)
    storage = torch.UntypedStorage
    storage.clone = _cloned(storage.clone)
    storage.__new__ = staticmethod(_made_there(storage.__new__))
    storage.byteswap = _refused_there(storage.byteswap)
    storage._new_shared = staticmethod(_unshared(storage._new_shared))
    # As on a machine without GPUs. It could not use those of this machine: their streams come from torch.accelerator,
    # which is the remote device now.
    torch.nn.DataParallel.__init__.__globals__["_get_available_device_type"] = lambda: None


def _is_plain(value: Any) -> bool:
    """Whether it is a remote tensor itself."""
    return tensors.is_plain(value) and value.device.type == TYPE


def _cloned(original: Any) -> Any:
    """Clones a storage on its device, for `copy.deepcopy`: PyTorch has no allocator for it."""

    @functools.wraps(original)
    def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
        return manual_kernels.whole(self).clone().untyped_storage() if self.device.type == TYPE else original(self)

    return clone


def _made_there(original: Any) -> Any:
    """Makes a storage on the device that is named: PyTorch has no allocator for it."""

    @functools.wraps(original)
    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != TYPE:
            return original(cls, *args, **kwargs, **({} if device is None else {"device": device}))
        size = args[0] if args else kwargs.get("size", 0)
        if isinstance(size, int):
            return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        return torch.tensor(size, dtype=torch.uint8, device=device).untyped_storage()

    return new


def _refused_there(original: Any) -> Any:
    """A method of storages that would read memory, which remote ones do not have in this process."""

    @functools.wraps(original)
    def method(self: torch.UntypedStorage, *args: Any) -> Any:
        if self.device.type == TYPE:
            raise RuntimeError(f"{original.__name__} of a storage on {self.device}: copy it with .cpu() first")
        return original(self, *args)

    return method


def _location(storage: torch.UntypedStorage) -> str | None:
    """Where ``torch.load`` restores a storage: files outlive devices."""
    return "cpu" if storage.device.type == TYPE else None


def _restored(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """What ``torch.load(…, map_location=device)`` has read, on the device."""
    if location.partition(":")[0] != TYPE:
        return None
    return manual_kernels.whole(storage).to(location).untyped_storage()


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
    """Does nothing with tensors of this machine: an upload copies their memory anyway."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self if self.is_cpu and tensors.streams else original(self, *args, **kwargs)

    return method


def _synchronize(device: Any = None, /) -> None:
    """``torch.accelerator.synchronize``."""
    torch_sky.synchronize(torch_sky.device_index(device))


class _Stats(OrderedDict[str, int]):
    """What is known about the memory of a device. PyTorch takes 0 for anything else."""

    def get(self, name: str, default: Any = None) -> int:
        if name not in self:
            raise NotImplementedError(f"a {TYPE} device does not count {name}")
        return self[name]


def _memory(device: Any) -> dict[str, int]:
    return tensors.streams[torch_sky.device_index(device)].memory()


def _memory_stats(device_index: Any = None, /) -> _Stats:
    """``torch.accelerator.memory_stats``, from which ``memory_allocated`` and the like read."""
    return _Stats({"allocated_bytes.all.current": _memory(device_index)["allocated"]})


def _memory_info(device_index: Any = None, /) -> tuple[int, int]:
    """``torch.accelerator.get_memory_info``: bytes that are free, and all."""
    found = _memory(device_index)
    return found["free"], found["total"]


def _empty_cache() -> None:
    """``torch.accelerator.empty_cache``: the cache is that of the worker, which keeps it."""


def settings() -> list[Any]:
    """The instruction that sends a host the settings of this program."""
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch.backends was used too, and they differ
        precision = ""
    dtype = tensors.DTYPE_NUMBERS[torch.get_default_dtype()]
    return [wire.SETTINGS, dtype, precision, torch.get_deterministic_debug_mode()]


def _sending_settings(original: Any) -> Any:
    """Sends hosts what was set. Plans depend on the default dtype: they are made again."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> None:
        before = torch.get_default_dtype()
        original(*args, **kwargs)
        if torch.get_default_dtype() is not before:
            plans.forget_plans()
        for stream in tensors.streams:
            stream.emit_always(settings())

    return function


def _printed(original: Any) -> Any:
    """Prints the values with one wait instead of several."""

    @functools.wraps(original)
    def values(self: Any, indent: int) -> Any:
        return original(manual_kernels.fetch(self) if _is_plain(self) else self, indent)

    return values


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

    def seed(self) -> int:
        found: int = super().seed()
        self.manual_seed(found)
        return found

    def get_state(self) -> torch.Tensor:
        return torch_sky.random_state(self.stream, self.remote_id)

    def set_state(self, new_state: torch.Tensor) -> Any:
        torch_sky.set_random_state(self.stream, self.remote_id, new_state)
        return self


class _Raised(threading.local):
    """What a hook has raised in a backward of a thread, while PyTorch no longer knows it."""

    error: BaseException | None = None


raised: Final = _Raised()


def _raising_again(original: Any) -> Any:
    """Raises what a hook has raised."""

    @functools.wraps(original)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        SIGNAL_GUARD.wrap()
        try:
            return original(*args, **kwargs)
        except SystemError:
            error, raised.error = raised.error, None
            if error is None:
                raise
        raise error  # not in the clause: it keeps its own context

    return run_backward
