"""What this machine notes about the runs that were started on it: with which inventory the last one was."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from skyfab._util.atomic import write
from skyfab._util.cache import cache_folder
from skyfab.inventory.inventory import Inventory, is_word

_USED: Final = "last-inventory"


def note_used(inventory: Inventory) -> None:
    """Notes on this machine that a run was started with this inventory, for `used_last`."""
    source = inventory.source
    if source is not None and (source.exists() or is_word(str(source))):
        with suppress(OSError):
            write(cache_folder() / _USED, str(source.absolute() if source.exists() else source))


def used_last(inventory: Inventory) -> str | None:
    """The ``--inventory=`` of the last run that was started here; None if it is this one, or this one was named."""
    source = inventory.source
    with suppress(OSError):
        noted = (cache_folder() / _USED).read_text()
        is_other = source is None or (inventory.is_found and noted not in (str(source), str(source.absolute())))
        if is_other and (Path(noted).exists() or is_word(noted)):
            return noted
    return None
