"""The public functions for remote devices, besides PyTorch's own. Importing this does not import torch."""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, TypeVar

from skyfab.errors import HostUnfit, UsageError

if TYPE_CHECKING:
    import torch

    from skyfab.device.host_link import HostLink
    from skyfab.device.stream import DeviceStream

T = TypeVar("T")
_registering: Final = threading.Lock()
"""Held while a device gets its index."""
staying: Final[dict[str, tuple[DeviceStream, dict[str, Any]]]] = {}
"""Devices that outlive the program, by the ids of their runs, each with what the program keeps on it."""


def open_device(name: str, link: HostLink, *, run: str = "", seeded: bool = True) -> DeviceStream:
    """Makes a device of this process for a device of a host. Raises UsageError and HostUnfit.

    One that outlives this process belongs to a `run`, whose id it is called by. If it is not `seeded`, another program
    has used it before, and its random numbers continue.
    """
    try:
        import torch
    except ImportError as error:
        raise UsageError(
            "a remote device needs torch in this program's environment too", hint="pip install torch"
        ) from error
    from skyfab.device import backend, patches, plans, tensors
    from skyfab.device.flusher import flusher
    from skyfab.device.stream import ACCELERATE, DeviceStream
    from skyfab.host.device import wire

    with _registering:
        backend.check()
        index = next(
            (old.index for old in tensors.streams if old.is_lost and not tensors.has_tensors(old)), len(tensors.streams)
        )
        if index > 127:
            raise UsageError("too many remote devices: a process can have 128", hint="close unused pools")
        stream = DeviceStream(index, name, link)
        if index < len(tensors.streams):  # the plans and layouts of the closed device refer to it
            tensors.forget_layouts(index)
            plans.forget_plans()
        tensors.streams[index : index + 1] = [stream]
        flusher.start()
    try:
        asked = stream.start([wire.HELLO])
        with _registering:
            backend.register()  # while the host imports torch
        hello = stream.receive(asked).value()
        if (unfit := _refusal(hello, link.name, torch.__version__, seeded=seeded)) is not None:
            link.close()
            raise unfit
    except BaseException:  # also what a handler of signals raises while the host imports torch
        stream.close()
        raise
    if run:
        stream.device = str(hello["device"])
        staying[run] = stream, {}
    if seeded:
        stream.emit([wire.SEED, torch.initial_seed() % (1 << 64), 0])  # torch.manual_seed may have come before
    stream.emit(patches.settings())
    if os.environ.get(ACCELERATE) in (None, *(str(old.torch_device) for old in tensors.streams if old.is_lost)):
        os.environ[ACCELERATE] = str(stream.torch_device)  # they would silently use this machine's CPU
    return stream


def _refusal(hello: Any, host: str, ours: str, *, seeded: bool) -> HostUnfit | None:
    """Why a host that has answered like this cannot be used by a program that has torch `ours`; None if it can."""
    theirs = hello.get("torch") if isinstance(hello, dict) else None
    if not theirs:
        return HostUnfit("its Python has no torch", host=host, hint="Compute(…, plugins=[sky.plugins.torch()])")
    if str(theirs).split(".")[:2] != ours.split(".")[:2]:
        own, other = (str(version).partition("+")[0] for version in (ours, theirs))
        is_safe = re.fullmatch(r"[0-9.]{1,40}", other)  # it is part of a command
        return HostUnfit(
            f"has torch {theirs}, this program has {ours}: major and minor version must be equal",
            host=host,
            hint=f'Image(pip=["torch=={own}"])' if seeded else f"pip install torch=={other}" if is_safe else None,
        )
    if hello.get("usable") is False:
        hint = 'compute.device("cpu"), or a build with CUDA: Compute(…, plugins=[sky.plugins.torch(cuda=…)])'
        return HostUnfit(f"its torch {theirs} cannot use CUDA", host=host, hint=hint)
    return None


def _stream_of(device: Any) -> DeviceStream:
    import torch

    from skyfab.device import tensors

    found = torch.device(device) if not isinstance(device, torch.device) else device
    if found.type != tensors.TYPE or (found.index or 0) >= len(tensors.streams):
        raise UsageError(f"{found} is not a remote device", hint='device = compute.device("cuda")')
    return tensors.streams[found.index or 0]


def synchronize() -> None:
    """Waits until all remote devices have executed everything. Raises the error of an operation that failed."""
    from skyfab.device.stream import streams

    if streams:
        from skyfab.device import torch_sky

        torch_sky.synchronize()


def memory(device: torch.device) -> dict[str, int]:
    """Bytes of memory on the remote `device`: ``allocated`` by this program's tensors, ``free`` and ``total``."""
    return _stream_of(device).memory()


def keep(device: torch.device, **values: Any) -> None:
    """Keeps `values`, by name, on a `device` that outlives the program: tensors, modules, optimizers, state dicts.

    ``sky.keep(device, model=model)``: `attach_device` returns the state dict as ``kept["model"]``. Remote tensors are
    kept themselves: what changes them later changes what is kept. Numbers, and tensors in the memory of this program,
    are kept as they are now, and once more when the pool is closed. ``model=None`` removes a name. Raises UsageError
    for a device that has no name, and DeviceError for other values.
    """
    from skyfab.device import keeping

    stream = _stream_of(device)
    kept = kept_on(stream)
    if kept is None:
        hint = 'create it with a name: compute.device("cuda", name="lab")'
        raise UsageError(
            f"{stream.torch_device} has no name, so it ends with the program", host=stream.link.name, hint=hint
        )
    keeping.keep(stream, values)
    kept.update(values)


def kept_on(stream: DeviceStream) -> dict[str, Any] | None:
    """What the program keeps on a device; None if the device ends with the program."""
    return next((kept for one, kept in staying.values() if one is stream), None)


def fetch(tensor: torch.Tensor) -> Future[torch.Tensor]:
    """Copies the remote `tensor` to this machine while the program continues. The future's result is the copy."""
    from skyfab.device import manual_kernels

    return manual_kernels.fetch_later(tensor)


def prefetch(loader: Iterable[T], device: torch.device, depth: int = 2) -> Iterator[T]:
    """The batches of `loader`, on `device`. The next `depth` batches are sent while the program works on one."""
    import collections

    import torch
    from torch.utils._pytree import tree_map_only

    def move(batch: T) -> T:
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)  # type: ignore[no-any-return]

    if depth < 1:
        raise UsageError(f"invalid depth={depth!r}: expected 1 or more")
    source = iter(loader)
    waiting = collections.deque(map(move, itertools.islice(source, depth)))
    while waiting:
        yield waiting.popleft()
        waiting.extend(map(move, itertools.islice(source, 1)))


def run_on(device: torch.device, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls ``function(*args, **kwargs)`` on the host of `device`, which uses remote tensors among them directly.

    Tensors that it returns stay on the host. Numbers, strings, None, and lists, tuples and dicts of all these are
    returned. A generator function returns an iterator over its values, as they arrive. Raises DeviceError if the
    function raises, and NotPicklable.
    """
    from skyfab.device import remote_functions

    return remote_functions.run(_stream_of(device), function, args, kwargs)


def load_on(device: torch.device, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls ``function(*args, **kwargs)`` on the host of `device`; it returns a module or state dict.

    Returns the state dict, with remote tensors: ``model.load_state_dict(state, assign=True)`` for a model
    that was made on the meta device.
    """
    from skyfab.device import remote_functions

    return remote_functions.load(_stream_of(device), function, args, kwargs)


def remote(module: torch.nn.Module) -> torch.nn.Module:
    """`module` with its forward as one instruction, and its backward as one. Its parameters must be on one device."""
    from skyfab.device import remote_functions

    return remote_functions.RemoteModule(module)
