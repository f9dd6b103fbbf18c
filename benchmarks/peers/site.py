"""`Site`: what a contestant's program needs to know: the hosts, how to log in, sizes. It is read from a JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    names: tuple[str, ...]
    """Of the hosts; `config` has them, and their addresses."""
    addresses: tuple[str, ...]
    user: str
    key: str
    config: str
    """An ssh_config."""
    inventory: str
    """The same hosts for skyfab."""
    python: str
    """The interpreter of the peers' environment, here and on the hosts."""
    interface: str
    """The network interface of each host."""
    own_interface: str
    own_address: str
    """Of this machine, where the hosts reach it."""
    folder: str
    """Has what is sent: the file `large`, the same file in the folder `alone`, and the folder `small`."""
    target: str
    """The folder on the hosts that they are sent into."""
    calls: int
    tasks: int
    array: int
    """MiB of the array."""

    @classmethod
    def read(cls, path: str | Path) -> Site:
        fields = json.loads(Path(path).read_text())
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    def first(self, count: int) -> tuple[str, ...]:
        """The addresses of so many hosts."""
        return self.addresses[:count]
