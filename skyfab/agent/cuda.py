"""CUDA that no longer works in a process: after a device-side assert, say, every later call on the GPU fails too."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # a cold host has no time for `typing`
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_SIGNS = ("CUDA error", "CUDA driver error", "cuda error", "CUBLAS_STATUS", "cuDNN error", "device-side assert")


def is_unusable(error: BaseException) -> bool:
    """Whether an error of a call has left CUDA unusable in this process.

    Only where the error is CUDA's, torch is loaded and has used CUDA, is a tiny operation tried. Running out of memory
    is no such error: the next call may need less.
    """
    torch = sys.modules.get("torch")
    if torch is None or not any(map(_is_cudas, _chain(error))):
        return False
    try:
        if not torch.cuda.is_initialized():
            return False
        for device in _used(torch):
            _probe(torch, device)
    except Exception as failure:
        return not _is_memory(failure)
    return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from: functions wrap errors in their own."""
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        seen.append(found)
        yield found
        found = found.__cause__ or found.__context__


def _is_cudas(error: BaseException) -> bool:
    text = _text(error)
    named = type(error).__name__ == "AcceleratorError"
    return (named or any(sign in text for sign in _SIGNS)) and not _is_memory(error)


def _is_memory(error: BaseException) -> bool:
    return type(error).__name__ == "OutOfMemoryError" or "out of memory" in _text(error)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""


def _used(torch: Any) -> list[int]:
    """The devices on which this process has something; asking another one would occupy memory there."""
    cuda = torch.cuda
    current = cuda.current_device()
    return [number for number in range(cuda.device_count()) if number == current or cuda.memory_reserved(number)]


def _probe(torch: Any, device: int) -> None:
    """Raises where the device cannot be used. Never waits for what still runs there: that may be a collective."""
    if torch.cuda.current_stream(device).query():
        torch.zeros(1, device=f"cuda:{device}").item()
