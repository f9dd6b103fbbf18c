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
        self.size = self.FLOOR
        self._base = float("inf")
        self._changed = 0.0

    def restart(self) -> None:
        """Another connection may have a longer way, or a narrower one."""
        self.size = self.FLOOR
        self._base = float("inf")
        self._changed = 0.0

    def observe(self, elapsed: float, now: float) -> None:
        """A frame was acknowledged `elapsed` seconds after it was sent."""
        self._base = min(self._base, elapsed)
        if now - elapsed < self._changed:
            return  # it was sent when the window had another size
        queued = elapsed - self._base
        if queued < 0.05:
            self.size = min(2 * self.size, self.CEILING)
            self._changed = now
        elif queued > 0.15:  # down to what the wire carries in the time that it takes at best
            self.size = max(int(self.size * (self._base + 0.1) / elapsed), self.FLOOR)
            self._changed = now

    @property
    def chunk(self) -> int:
        return min(CHUNK, max(8 * 1024, self.size // 8))
