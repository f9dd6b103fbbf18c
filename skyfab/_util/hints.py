"""Words hints as the user types them: arguments in a program, options and commands to paste at the command line."""

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
        """An argument of `Image`, or the option for it.

        >>> HINTS.image("pip"), HINTS.image("pip", "numpy"), HINTS.image("python", "3.11")
        ('Image(pip=…)', "Image(pip=['numpy'])", "Image(python='3.11')")
        >>> with HINTS.of_command(None):
        ...     HINTS.image("pip"), HINTS.image("pip", "a<2"), HINTS.image("includes"), HINTS.index("URL", ["a", "…"])
        ('--pip=…', "--with='a<2'", '--sync', '--index=URL=a,…')
        """
        if self._is_command:
            option = "with" if name == "pip" and value else name  # --pip would replace what the project needs
            return "--sync" if name == "includes" else f"--{option}={shlex.quote(value) if value else '…'}"
        shown = [value] if name in ("pip", "includes") else value
        return f"Image({name}={shown!r})" if value else f"Image({name}=…)"

    def index(self, url: str, packages: Sequence[str] = ()) -> str:
        """An index of an image, or the option for it.

        >>> HINTS.index("URL"), HINTS.index("URL", ["torch", "…"])
        ("PipIndex('URL')", "PipIndex('URL', packages=('torch', '…'))")
        """
        if self._is_command:
            return f"--index={url}={','.join(packages) or '…'}"
        return f"PipIndex({url!r}, packages={tuple(packages)!r})" if packages else f"PipIndex({url!r})"

    def adapted(self, text: str) -> str:
        """A text with commands ``skyfab TASK …``, as they have to be typed here."""
        given = "" if self._inventory is None else f" --inventory={shlex.quote(self._inventory)}"

        def command(match: re.Match[str]) -> str:
            return f"{self.program} {match[1]}" + (given if self.takes_inventory(match[1]) else "")

        return re.sub(r"\bskyfab ([a-z]+(?:\.[a-z]+)?)(?![\w:.])", command, text)


HINTS: Final = Hints()
