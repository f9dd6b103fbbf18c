"""Mistakes of an inventory: collected, and reported at once, each with its file and line."""

from __future__ import annotations

from skyfab.errors import InventoryError


class Mistakes:
    """What is wrong with one source, in order."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._found: dict[tuple[str, str, str | None], None] = {}

    def note(self, where: str, problem: str, hint: str | None) -> None:
        """Records a mistake, once; `where` is ``file:line: words``."""
        self._found[where, problem, hint] = None

    def check(self) -> None:
        """Raises one `InventoryError` with all of them, if there are any."""
        if len(self._found) == 1:
            where, problem, hint = next(iter(self._found))
            raise InventoryError(f"{where}: {problem}", hint=hint)
        if self._found:
            lines = [f"{where}: {problem}" + (f" ({hint})" if hint else "") for where, problem, hint in self._found]
            raise InventoryError("\n  ".join([f"{self.source}: {len(lines)} mistakes", *lines]))
