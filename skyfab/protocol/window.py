"""Congestion window: how many bytes of bulk data may be in flight on a connection."""

from __future__ import annotations

from skyfab.protocol.frames import CHUNK

TYPE_CHECKING = False  # see frames.py
if TYPE_CHECKING:
    from typing import Final


class Window:
    """How many bytes may be in flight: enough to use the bandwidth, too few to queue up along the path.

    On a slow link with deep buffers, a cancel would otherwise wait behind megabytes of data.
    """

    FLOOR: Final = 64 * 1024
    CEILING: Final = 32 * 1024 * 1024

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Starts over for a new connection, whose latency and bandwidth may differ."""
        self.size = self.FLOOR
        self._base = float("inf")
        self._changed = 0.0

    def observe(self, elapsed: float, now: float) -> None:
        """A frame was acknowledged `elapsed` seconds after it was sent."""
        self._base = min(self._base, elapsed)
        if now - elapsed < self._changed:
            return  # the frame was sent before the last change of the window's size
        queued = elapsed - self._base
        if queued < 0.05:
            self.size = min(2 * self.size, self.CEILING)
            self._changed = now
        elif queued > 0.15:  # shrink to about what the path carries in its best round-trip time
            self.size = max(int(self.size * (self._base + 0.1) / elapsed), self.FLOOR)
            self._changed = now

    @property
    def chunk(self) -> int:
        return min(4 * CHUNK, max(8 * 1024, self.size // 8))
