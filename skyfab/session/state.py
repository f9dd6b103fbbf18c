"""The states of a connection, and its transitions.

NEW → CONNECTING → OPEN ⇄ SUSPECT → LOST      a lost host stays lost: its session ends
                   OPEN → CLOSING → CLOSED    this side closes the connection
                   OPEN → DETACHED → CLOSED   the agent continues on its own

A connection can also be closed or lost before it is open.
"""

from __future__ import annotations

import enum
from typing import Final


class State(enum.Enum):
    """The state of a connection."""

    NEW = "new"
    CONNECTING = "connecting"
    """There is a stream; the agent's hello has not been received."""
    OPEN = "open"
    SUSPECT = "suspect"
    """The stream is broken, or heartbeats are missed: new streams are attempted."""
    CLOSING = "closing"
    DETACHED = "detached"
    CLOSED = "closed"
    LOST = "lost"


LEAVING: Final = frozenset({State.CLOSING, State.DETACHED, State.CLOSED})
"""This side closes the connection."""
