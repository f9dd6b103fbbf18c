"""The persistent lab, which stays up between programs: implements `lab.up`, `lab.down` and `lab.status`."""

from __future__ import annotations

import os
from pathlib import Path

from skyfab.errors import UsageError

from . import programs, root
from .lab import STATE, Lab


def up(count: int = 4, folder: Path | str | None = None, *, python: str | None = None) -> Lab:
    """Starts the lab of `count` hosts, or those that are down.

    `folder` is where it is kept, if not in the cache. Installs the programs that it needs, if permitted. `python` is as
    for `Lab.start`; for None, this program's own is lent where the system has none of its version.

    Raises UsageError if it is up with another number of hosts, or if programs are missing.
    """
    place, lab = home(folder), find(folder)
    if lab is not None and not any(host.up for host in lab.hosts):  # the machine was restarted
        lab.stop()
        lab = None
    if lab is None:
        programs.require()
        return Lab.start(count, folder=place, python=python or root.python_to_lend(), persistent=True)
    if len(lab.hosts) != count:
        raise UsageError(
            f"a lab of {len(lab.hosts)} hosts is already up, not of {count}",
            hint=f"skyfab lab.down, then skyfab lab.up --count={count}",
        )
    for host in lab.hosts:
        if not host.up:
            host.reboot()
    return lab


def find(folder: Path | str | None = None) -> Lab | None:
    """The persistent lab in `folder`, with hosts up or not; None if there is no lab."""
    place = home(folder)
    return Lab.load(place) if (place / STATE).exists() else None


def home(folder: Path | str | None = None) -> Path:
    """The folder of the persistent lab: the given one, or `$SKYFAB_LAB`, or in the user's state folder."""
    given = folder or os.environ.get("SKYFAB_LAB")
    if given:
        return Path(given).expanduser().absolute()
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "skyfab" / "lab"
