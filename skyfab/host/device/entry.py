"""The function that the worker of a device runs. The client can import it without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skyfab.host.device import wire
from skyfab.protocol import codec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch


def execute(device: str, batch: Any, *buffers: memoryview) -> codec.Payload:
    """Executes a batch of instructions on a device of this host."""
    try:
        from skyfab.host.device import worker
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return codec.Payload(wire.encode({"value": {"torch": None}}))  # to HELLO: nothing else follows
    return worker.executor(device).execute(batch, buffers)


def call(
    device: str,
    first: int,
    function: Callable[..., Any],
    sources: Mapping[str, str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Calls a function of the program. The tensors of its result stay, with ids from `first` on, if that is not 0."""
    from skyfab.host.agent.functions import show_lines
    from skyfab.host.device import worker

    show_lines(sources)
    return worker.executor(device).call(first, getattr(function, "fn", function), args, kwargs)


def tensor(device: str, ident: int, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    """A tensor of a device of this host: remote tensors are unpickled by this. It is a leaf. Raises Lost."""
    import torch

    from skyfab.host.device import worker

    found = worker.executor(device).tensor(ident)
    return torch.nn.Parameter(found, requires_grad) if is_parameter else found.requires_grad_(requires_grad)
