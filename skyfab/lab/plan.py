"""The settings for the hosts of a new lab."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Most fields are arguments of `Lab.start`, which documents them."""

    folder: Path
    """Contains a folder for each host, by name."""
    count: int
    user: str
    python: str
    """The interpreter that hosts have; empty for none."""
    lends_python: bool
    """Whether it is mounted into the hosts and named in the inventory; else it is the system's own."""
    client_key: str
    password: str
    lend: tuple[str, ...]
    second_network: bool
    isolated: bool
    forwarded: bool
    reverse_dns: bool
    shells: Mapping[str, str]
    sshd: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        return [f"node{number}" for number in range(1, self.count + 1)]
