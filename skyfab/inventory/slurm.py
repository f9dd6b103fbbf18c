"""The hosts of a Slurm allocation, from the variables that Slurm sets inside it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

from skyfab.errors import InventoryError, UsageError
from skyfab.inventory.builder import Listing
from skyfab.inventory.selection import expand, split
from skyfab.inventory.source import Contents, Source

_NODES: Final = "SLURM_JOB_NODELIST"
_OUTSIDE: Final = "start an allocation first: salloc --nodes=2"


def read(environ: Mapping[str, str]) -> Contents:
    """The hosts of the allocation; those of each component of a heterogeneous job are also a group, het0 and so on.

    Which GPUs belong to the job is not read from Slurm, whose variables are about one host: a login on a host of the
    job sees those of the job where Slurm confines it (pam_slurm_adopt), else all of them.
    Raises InventoryError outside of an allocation.
    """
    job = environ.get("SLURM_JOB_ID", "")
    listing = Listing(f"slurm job {job}" if job else "slurm")
    size = re.fullmatch("[0-9]{1,4}", environ.get("SLURM_HET_SIZE", ""))
    parts = {f"het{number}": f"{_NODES}_HET_GROUP_{number}" for number in range(int(size[0]) if size else 0)}
    for group, variable in (parts or {"": _NODES}).items():
        text = environ.get(variable) or ("" if parts else environ.get("SLURM_NODELIST", ""))
        if not text:
            raise InventoryError(f"not inside a Slurm allocation: {variable} is not set", hint=_OUTSIDE)
        names = _names(text, variable)
        for name in names:
            listing.add(name, variable, {})
        if group:
            listing.add_group(group, variable, names)
    return listing.read(_OUTSIDE)


def _names(text: str, variable: str) -> list[str]:
    """The names that a compressed list stands for."""
    try:
        return [name for word in split(text) for name in expand(word)]
    except UsageError as error:
        raise InventoryError(f"{variable}: {error.message}", hint=error.hint) from None


SOURCE = Source(word="slurm", takes="nothing", read=lambda _: read(os.environ))
