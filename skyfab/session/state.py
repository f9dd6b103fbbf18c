"""The states of a connection, and the allowed transitions.

NEW → CONNECTING → OPEN ⇄ SUSPECT → LOST      a lost host stays lost: its session ends
                   OPEN → CLOSING → CLOSED    this side closes the connection
                   OPEN → DETACHED → CLOSED   the agent continues on its own

`NEXT` has all of them: for example, a connection can be closed before it is open.
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
"""This side closes the connection."""
