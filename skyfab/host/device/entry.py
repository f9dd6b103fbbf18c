"""What the workers of devices run, as a client can name it without importing torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from skyfab.protocol import codec


def execute(device: str, batch: Any, *buffers: memoryview) -> codec.Payload:
    """Executes a batch of instructions on a device of this host."""
    from skyfab.host.device import worker

    return worker.execute(device, batch, *buffers)


def call(
    device: str,
    first: int,
    function: Callable[..., Any],
    sources: Mapping[str, str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Calls a function of the program. The tensors of its result stay, with ids from `first` on, if that is not 0."""
    from skyfab.host.device import worker

    return worker.call(device, first, function, sources, args, kwargs)


def tensor(device: str, ident: int, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    """A tensor of a device of this host: remote tensors are unpickled by this."""
    from skyfab.host.device import worker

    return worker.tensor(device, ident, requires_grad, is_parameter)
