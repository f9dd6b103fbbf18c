"""Words the commands in hints as the user types them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final


class Hints:
    """What commands in hints must repeat of the command that is running."""

    def __init__(self) -> None:
        self.program = "skyfab"
        """The program as it was started: ``./inv`` in a checkout."""
        self.takes_inventory: Callable[[str], bool] = lambda name: False
        """Whether the command of this name takes ``--inventory``."""
        self.words: Sequence[str] = ()
        """What was typed after the command's name, without ``--inventory=``."""
        self._inventory: str | None = None

    @contextmanager
    def of_command(self, inventory: str | None) -> Iterator[None]:
        """Inside this context a command runs: hints repeat this ``--inventory=``."""
        self._inventory = inventory
        try:
            yield
        finally:
            self._inventory = None

    def adapted(self, text: str) -> str:
        """A text with commands ``skyfab TASK …``, as they have to be typed here."""
        given = "" if self._inventory is None else f" --inventory={shlex.quote(self._inventory)}"

        def command(match: re.Match[str]) -> str:
            return f"{self.program} {match[1]}" + (given if self.takes_inventory(match[1]) else "")

        return re.sub(r"\bskyfab ([a-z]+(?:\.[a-z]+)?)(?![\w:.])", command, text)


HINTS: Final = Hints()
