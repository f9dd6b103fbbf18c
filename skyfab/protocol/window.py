"""The window: how much bulk data may be under way on a connection."""

from __future__ import annotations

from skyfab.protocol.frames import CHUNK

TYPE_CHECKING = False  # see frames
if TYPE_CHECKING:
    from typing import Final


class Window:
    """How many bytes may be under way: enough to fill the wire, not the queues along it.

    A slow link with deep buffers would otherwise hold megabytes ahead of a cancel.
    """

    FLOOR: Final = 64 * 1024
    CEILING: Final = 32 * 1024 * 1024

    def __init__(self) -> None:
        self.size = 256 * 1024
        self._base = float("inf")
        self._hold = 0.0

    def restart(self) -> None:
        """Another connection may have a longer way."""
        self._base = float("inf")
        self._hold = 0.0

    def observe(self, elapsed: float, now: float) -> None:
        """A frame was acknowledged `elapsed` seconds after it was sent."""
        self._base = min(self._base, elapsed)
        queued = elapsed - self._base
        if queued < 0.05:
            self.size = min(2 * self.size, self.CEILING)
        elif queued > 0.15 and now > self._hold:
            self.size = max(self.size * 3 // 4, self.FLOOR)
            self._hold = now + elapsed

    @property
    def chunk(self) -> int:
        return min(CHUNK, max(8 * 1024, self.size // 8))
