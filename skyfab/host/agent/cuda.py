"""CUDA in a worker: detects that it is unusable, as after a device-side assert, and limits the memory of torch."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from types import SimpleNamespace

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_SIGNS = ("CUDA error", "CUDA driver error", "cuda error", "CUBLAS_STATUS", "cuDNN error", "device-side assert")


def is_unusable(error: BaseException) -> bool:
    """Whether the error of a call has left CUDA unusable in this process.

    Tries a tiny operation, but only if the error is from CUDA, and torch is loaded and has used CUDA. Running out of
    memory does not count: the next call may need less.
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
    """The error and its causes, because functions wrap errors in their own."""
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and not any(found is one for one in seen):
        seen.append(found)
        yield found
        found = found.__context__ if found.__cause__ is None else found.__cause__


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
    """The devices on which this process has memory. Probing another one would allocate memory there."""
    cuda = torch.cuda
    current = cuda.current_device()
    return [number for number in range(cuda.device_count()) if number == current or cuda.memory_reserved(number)]


def _probe(torch: Any, device: int) -> None:
    """Raises if the device is unusable. Never waits for running kernels: one may be a collective that hangs."""
    if torch.cuda.current_stream(device).query():
        torch.zeros(1, device=f"cuda:{device}").item()


def limit_memory(share: str | None) -> None:
    """Has torch use at most this share of the memory of the only GPU of this process, if there is a limit.

    torch loads CUDA when it is first used. When torch.cuda is imported, the limit is added to the calls to make then.
    """

    def find_spec(name: str, path: Any, target: Any = None) -> Any:
        if name != "torch.cuda":
            return None
        sys.meta_path.remove(finder)
        spec: Any = PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            module._lazy_call(lambda: module.set_per_process_memory_fraction(float(share or 1), 0))  # noqa: SLF001 - no public one

        spec.loader.exec_module = exec_module
        return spec

    finder: Any = SimpleNamespace(find_spec=find_spec)
    if share is not None:
        sys.meta_path.insert(0, finder)
