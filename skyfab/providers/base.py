"""`Provider`: creates hosts when it is started, and removes them when it is stopped."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from skyfab.inventory.inventory import Inventory

Tell = Callable[[str], None]
"""Takes a line for the user about something that takes long."""

LOG: Final = logging.getLogger("skyfab")


class Provider(ABC):
    """Hosts that exist from `start` to `stop`, or inside a ``with``, which gives their inventory."""

    @abstractmethod
    def start(self, tell: Tell = LOG.info) -> Inventory:
        """Makes the hosts; returns when they accept connections. If that fails or is interrupted, none is left.

        `tell` is called with a line about each step that takes long.
        """

    @abstractmethod
    def stop(self) -> None:
        """Removes what `start` has made, and nothing else. Does nothing where there is nothing of it."""

    def __enter__(self) -> Inventory:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()
