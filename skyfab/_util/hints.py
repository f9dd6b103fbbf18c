"""Words hints as the user types them: arguments of `Image` in a program, options and commands at the command line."""

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
        self._is_command = False

    @contextmanager
    def of_command(self, inventory: str | None) -> Iterator[None]:
        """Inside this context a command runs: hints name its options, and repeat this ``--inventory=``."""
        self._inventory, self._is_command = inventory, True
        try:
            yield
        finally:
            self._inventory, self._is_command = None, False

    def image(self, name: str, value: str = "") -> str:
        """The argument of `Image` that adds a package (pip) or a file (includes), or the option for it.

        >>> HINTS.image("pip", "numpy"), HINTS.image("includes")
        ("Image(pip=['numpy'])", 'Image(includes=…)')
        >>> with HINTS.of_command(None):
        ...     HINTS.image("pip", "a<2"), HINTS.image("includes")
        ("--with='a<2'", '--sync')
        """
        if self._is_command:
            return "--sync" if name == "includes" else f"--with={shlex.quote(value)}"
        return f"Image({name}={[value]!r})" if value else f"Image({name}=…)"

    def adapted(self, text: str) -> str:
        """A text with commands ``skyfab TASK …``, as they have to be typed here."""
        given = "" if self._inventory is None else f" --inventory={shlex.quote(self._inventory)}"

        def command(match: re.Match[str]) -> str:
            return f"{self.program} {match[1]}" + (given if self.takes_inventory(match[1]) else "")

        return re.sub(r"\bskyfab ([a-z]+(?:\.[a-z]+)?)(?![\w:.])", command, text)


HINTS: Final = Hints()
