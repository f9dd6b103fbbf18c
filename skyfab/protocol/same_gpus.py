"""Tensors on a GPU that the receiver uses too: only a handle is sent, and the receiver copies on the GPU (CUDA IPC)."""

from __future__ import annotations

import os

TYPE_CHECKING = False  # see frames.py
if TYPE_CHECKING:
    from typing import Any


def share(storage: Any) -> tuple[Any, ...] | None:
    """The arguments for `received`, once, in another process of this machine. None if the memory cannot be shared.

    What is shared is a copy, which the caller cannot change; torch frees it when it was received.
    """
    import torch

    if any("expandable" in os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")):
        return None  # such memory has other handles
    try:
        torch.cuda.ipc_collect()
        device, *handle = storage.clone()._share_cuda_()
    except RuntimeError:  # not enough memory for the copy; or not a system that can do this, such as WSL
        return None
    return (_uuid(device), *handle)


def received(uuid: str, *handle: Any) -> Any:
    """A storage with the content of one that was shared. Raises RuntimeError."""
    import torch

    found = [device for device in range(torch.cuda.device_count()) if _uuid(device) == uuid]
    if not found:
        raise RuntimeError(f"GPU {uuid} of a tensor is not visible to this process")
    with torch.cuda.device(found[0]):
        torch.cuda.init()
        shared = torch.UntypedStorage._new_shared_cuda(found[0], *handle)
        own = shared.clone()
        torch.cuda.synchronize()  # from now on the sender may free its copy
    return own


def release(shared: tuple[Any, ...]) -> None:
    """What was shared will not be received."""
    import torch

    torch.UntypedStorage._release_ipc_counter_cuda(*shared[4:6])


def _uuid(device: int) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)
