"""The states of a connection, and which one may follow which.

NEW → CONNECTING → OPEN ⇄ SUSPECT → LOST      a host that is lost stays so: its session ends
                   OPEN → CLOSING → CLOSED    this side wants it to end
                   OPEN → DETACHED → CLOSED   the agent is left to itself
"""

from __future__ import annotations

import enum
from typing import Final


class State(enum.Enum):
    """Where a connection stands."""

    NEW = "new"
    CONNECTING = "connecting"
    """There is a stream; the agent has not said hello."""
    OPEN = "open"
    SUSPECT = "suspect"
    """The stream is broken, or heartbeats are missed: others are attempted."""
    CLOSING = "closing"
    DETACHED = "detached"
    CLOSED = "closed"
    LOST = "lost"


NEXT: Final[dict[State, frozenset[State]]] = {
    State.NEW: frozenset({State.CONNECTING, State.CLOSING}),
    State.CONNECTING: frozenset({State.OPEN, State.CLOSING, State.LOST}),
    State.OPEN: frozenset({State.SUSPECT, State.CLOSING, State.DETACHED, State.LOST}),
    State.SUSPECT: frozenset({State.OPEN, State.CLOSING, State.DETACHED, State.LOST}),
    State.CLOSING: frozenset({State.CLOSED}),
    State.DETACHED: frozenset({State.CLOSED}),
    State.CLOSED: frozenset(),
    State.LOST: frozenset(),
}
LEAVING: Final = frozenset({State.CLOSING, State.DETACHED, State.CLOSED})
"""This side wants it to end."""
