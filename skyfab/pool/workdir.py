"""The working folder of functions on each host.

``"auto"`` corresponds to the current folder here: on a host, a persistent folder in the cache; on this machine, the
current folder itself. A path is that folder on every host. ``"temp"`` is deleted with the pool.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from skyfab._util.cache import cache_folder
from skyfab.detached.written import current_folder, project
from skyfab.errors import UsageError
from skyfab.inventory.host import CHECKS, Host


@dataclass(frozen=True, slots=True)
class Workdir:
    """The working folder on one host."""

    sent: str = ""
    """As sent to the agent: a path, the name of a folder in its cache, or "" for a folder of the pool."""
    callers: bool = False
    """It is the caller's own folder, so `includes` need not be copied there."""


class Workdirs:
    """The working folder of a pool on each of its hosts."""

    def __init__(self, choice: str | os.PathLike[str]) -> None:
        """Raises UsageError for an invalid choice."""
        try:
            self._choice: str = CHECKS["workdir"](os.fspath(choice) if isinstance(choice, os.PathLike) else choice)
        except UsageError as error:
            raise UsageError(f"workdir {error.message}", hint=error.hint) from None
        self._here = current_folder()

    def of(self, host: Host) -> Workdir:
        choice = host.workdir if self._choice == "auto" else self._choice
        if choice == "temp" or (choice == "auto" and not self._here):
            return Workdir()
        if host.is_here and choice in ("auto", self._here):
            return Workdir(self._here, callers=True)
        return Workdir(project(self._here) if choice == "auto" else choice)


def last_run() -> Path:
    """The file that has the digest of the project tree of the last `skyfab run` in the current folder."""
    return cache_folder() / "sent" / project(current_folder())
