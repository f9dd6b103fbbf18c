"""What the workers of devices run, as a client can name it without importing torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyfab.protocol import codec


def execute(device: str, batch: Any, *buffers: memoryview) -> codec.Payload:
    """Executes a batch of instructions on a device of this host."""
    from skyfab.device import worker

    return worker.execute(device, batch, *buffers)
