"""Stops a detached run."""

from __future__ import annotations

import os
import signal
import time

from skyfab.host.ask.runs import agent_of

TYPE_CHECKING = False  # importing `typing` would slow the start
if TYPE_CHECKING:
    from typing import Final

_SECONDS: Final = 10.0
_TICK: Final = 0.1


def stop(cache: str, *, run: str) -> int | None:
    """Terminates the agent of a run and waits until it has ended. Returns its process id if it has not."""
    folder = os.path.join(cache, "runs", os.path.basename(run))
    pid = agent_of(folder)
    if pid is None:
        return None
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        if agent_of(folder) is None:
            return None
        time.sleep(_TICK)
    return pid
