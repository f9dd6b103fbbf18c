"""The persistent lab, which stays up between programs: implements `lab.up`, `lab.down` and `lab.status`."""

from __future__ import annotations

import os
from pathlib import Path

from skyfab.errors import UsageError

from . import programs, root
from .host import LabHost
from .lab import STATE, Lab


def up(count: int = 4, folder: Path | str | None = None, *, python: str | None = None) -> Path:
    """Starts the lab of `count` hosts, or those that are down; returns the path of its inventory.

    `folder` is where it is kept, if not in the cache. Installs the programs that it needs, if permitted. `python` is as
    for `Lab.start`; for None, this program's own is lent where the system has none of its version.

    Raises UsageError if it is up with another number of hosts or another Python, or if programs are missing.
    """
    place = home(folder)
    lab = find(place)
    if lab is not None and not any(host.up for host in lab.hosts):  # the machine was restarted
        lab.stop()
        lab = None
    if lab is None:
        programs.require()
        return Lab.start(count, folder=place, python=python or root.python_to_lend(), persistent=True).inventory
    if len(lab.hosts) != count:
        raise UsageError(
            f"a lab of {len(lab.hosts)} hosts is already up, not of {count}",
            hint=f"skyfab lab.down, then skyfab lab.up --count={count}",
        )
    if python is not None and lab.hosts[0].python != str(Path(python).absolute()):
        raise UsageError(
            f"a lab is already up, with the Python {lab.hosts[0].python or 'none'}, not {python}",
            hint=f"skyfab lab.down, then skyfab lab.up --count={count} --python={python}",
        )
    for host in lab.hosts:
        if not host.up:
            host.reboot()
    return lab.inventory


def down(folder: Path | str | None = None) -> bool:
    """Stops the lab in `folder` and removes all of it; returns whether there was one."""
    lab = find(folder)
    if lab is not None:
        lab.stop()
    return lab is not None


def status(folder: Path | str | None = None) -> list[LabHost]:
    """The hosts of the lab in `folder`, up or not; empty if there is no lab."""
    lab = find(folder)
    return lab.hosts if lab is not None else []


def find(folder: Path | str | None = None) -> Lab | None:
    """The persistent lab, or None."""
    place = home(folder)
    return Lab.load(place) if (place / STATE).exists() else None


def home(folder: Path | str | None = None) -> Path:
    """The folder of the persistent lab: the given one, or `$SKYFAB_LAB`, or in the user's state folder."""
    given = folder or os.environ.get("SKYFAB_LAB")
    if given:
        return Path(given).expanduser().absolute()
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "skyfab" / "lab"
