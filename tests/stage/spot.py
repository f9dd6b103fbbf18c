"""A spot: a folder with one path on this machine and on every host, where functions and tests leave notes."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from skyfab.lab import LabHost  # hosts import this file, and have no lab

T = TypeVar("T")


def until(condition: Callable[[], T], what: str = "", timeout: float = 100.0) -> T:
    """Waits until a condition holds, and returns what it said."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, f"did not come to be: {what or condition}"
        time.sleep(0.01)
    return found


class Spot:
    """Notes by name. `here` / `"name"` is the path that a function is given."""

    def __init__(self, hosts: Sequence[LabHost]) -> None:
        self._here = Path(tempfile.mkdtemp(prefix="skyfab-spot-"))
        self._places = {"here": self._here}
        for host in hosts:
            if host.kind == "namespace":
                self._places[host.name] = host.path(str(self._here))
        for place in self._places.values():
            place.mkdir(exist_ok=True)
            place.chmod(0o777)

    def __truediv__(self, name: str) -> str:
        return f"{self._here}/{name}"

    def notes(self, name: str) -> dict[str, str]:
        """What has been left under a name, by machine."""
        found = {}
        for machine, place in self._places.items():
            try:
                found[machine] = (place / name).read_text()
            except FileNotFoundError:
                continue
        return found

    def names(self) -> set[str]:
        """Everything that has been left, on any machine."""
        return {entry.name for place in self._places.values() for entry in place.iterdir()}

    def wait(self, name: str, count: int = 1) -> dict[str, str]:
        """Waits until so many machines have a note of that name."""
        until(lambda: len(self.notes(name)) >= count, f"a note {name!r} on {count} machines")
        return self.notes(name)

    def read(self, name: str, count: int = 1) -> dict[str, str]:
        """Waits until so many machines have a note of that name that says something: files are created empty."""
        until(lambda: sum(map(bool, self.notes(name).values())) >= count, f"a note {name!r} on {count} machines")
        return self.notes(name)

    def leave(self, name: str) -> None:
        """Leaves a note on every machine."""
        for place in self._places.values():
            (place / name).touch()

    def close(self) -> None:
        for place in self._places.values():
            shutil.rmtree(place, ignore_errors=True)  # a host that was rebooted has it no more
