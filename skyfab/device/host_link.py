"""What a stream needs of its device's host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from skyfab.device.batches import Batch
    from skyfab.protocol import codec


class HostLink(Protocol):
    """The host of a device, as its stream sees it."""

    @property
    def name(self) -> str:
        """The host's name."""

    def addresses_for(self, other: Any) -> Sequence[str]:
        """Addresses at which the host of another device may reach this one; the likeliest first."""

    def notice(self, text: str) -> None:
        """Shows the user a warning about the host."""

    def send(self, payload: codec.Payload, batch: Batch) -> None:
        """Sends a batch; its `answered` or `failed` is called once. Raises HostLost."""

    def receive(self, batch: Batch) -> None:
        """Waits for the reply to a batch. Raises UsageError on a thread that may not wait."""

    def may_wait(self) -> bool:
        """Whether this thread may wait: the thread that reads cannot, where it runs callbacks."""

    def is_alive(self) -> bool:
        """Whether the worker still is the process that has the tensors."""

    def close(self) -> None:
        """Ends the worker."""
