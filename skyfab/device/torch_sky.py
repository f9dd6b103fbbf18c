"""``torch.sky``: the module in which PyTorch looks up properties of remote devices, and their random state."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

import torch

from skyfab.device import tensors
from skyfab.device.manual_kernels import fill, snapshot
from skyfab.device.stream import DeviceStream, open_streams
from skyfab.host.device import wire

_initialized: Final = True
"""PyTorch's checkpoint() reads it: otherwise it would silently not keep the state of random numbers."""


class _Current(threading.local):
    """The device that is meant where none is named, of each thread."""

    index = 0


_current: Final = _Current()


class device:
    """``with torch.sky.device(1)``: the device that is meant where none is named."""

    def __init__(self, device: Any) -> None:
        self._index = device_index(device)

    def __enter__(self) -> None:
        self._before, _current.index = _current.index, self._index

    def __exit__(self, *_: object) -> None:
        _current.index = self._before


def is_initialized() -> bool:
    return True


def is_available() -> bool:
    return True


def _lazy_init() -> None:
    """Does nothing. Without it, torch 2.11 imports this module again whenever a tensor is made: 4 µs each time."""


def _is_in_bad_fork() -> bool:
    return False


def current_device() -> int:
    return _current.index


def device_count() -> int:
    return max((stream.index + 1 for stream in open_streams()), default=0)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def synchronize(device: Any = None) -> None:
    """Waits until everything has been executed; on all devices, or one."""
    for stream in _open_streams(device):
        stream.ask([wire.SYNC]).value()


def _open_streams(device: Any = None) -> Sequence[DeviceStream]:
    """The devices that can be used; all, or one."""
    if device is None:
        return open_streams()
    stream = tensors.streams[device_index(device)]
    return [] if stream.is_lost else [stream]


def device_index(device: Any) -> int:
    """The index of a device, which may be given; that of the current device for None."""
    if device is None:
        return _current.index
    return device if isinstance(device, int) else torch.device(device).index or 0


# ---- random numbers


def manual_seed_all(seed: int) -> None:
    for stream in open_streams():
        stream.emit([wire.SEED, seed % (1 << 64), 0])


manual_seed: Final = manual_seed_all


def get_rng_state(device: Any = None) -> torch.Tensor:
    for stream in _open_streams(device_index(device)):
        return random_state(stream, 0)
    return torch.empty(0, dtype=torch.uint8, device="cpu")  # PyTorch saves and restores those of closed devices too


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    for stream in _open_streams(device_index(device)):
        set_random_state(stream, 0, state)


def random_state(stream: DeviceStream, ident: int) -> torch.Tensor:
    """The state of a generator."""
    batch = stream.ask([wire.STATE, ident])
    batch.value()
    size = len(batch.buffers[0]) if batch.buffers else 0
    result = torch.empty(size, dtype=torch.uint8, device="cpu")
    fill(result, batch.buffers)
    return result


def set_random_state(stream: DeviceStream, ident: int, state: torch.Tensor) -> None:
    stream.ask([wire.STATE, ident], snapshot(state, state.shape, torch.uint8))
