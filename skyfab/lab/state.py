"""The files that describe a lab: state.json, from which other programs load it, and inventory.toml for skyfab."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from skyfab._util import atomic, toml
from skyfab.errors import UsageError

from .host import LabHost
from .loopback import LoopbackHost
from .namespace import NamespaceHost
from .network import Network

Kind = Literal["namespace", "loopback"]
STATE = "state.json"
INVENTORY = "inventory.toml"


@dataclass(frozen=True, kw_only=True)
class Record:
    """A lab as it was started. Which processes run is stored in each host's folder."""

    kind: Kind
    hosts: tuple[LabHost, ...]
    password: str
    limits: tuple[str, ...]

    def save(self, folder: Path) -> None:
        """Writes both files, readable only by this user."""
        atomic.write(folder / INVENTORY, inventory(self.hosts))
        atomic.write(folder / STATE, json.dumps(asdict(self), default=str, indent=1))

    @classmethod
    def load(cls, folder: Path) -> Record:
        """Raises UsageError if there is no lab in the folder."""
        try:
            state = json.loads((folder / STATE).read_text())
            hosts = tuple(_host(state["kind"], fields) for fields in state["hosts"])
            return cls(kind=state["kind"], hosts=hosts, password=state["password"], limits=tuple(state["limits"]))
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(f"no lab is up in {folder}", hint="skyfab lab.up") from None
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{folder / STATE} is not the record of a lab: {error!r}") from error


def inventory(hosts: Sequence[LabHost]) -> str:
    """The text of an inventory file; its group `lab` contains all hosts."""
    first = hosts[0]
    lines = ["[defaults]", f"user = {toml.dumps(first.user)}", f"identity = {toml.dumps(str(first.identity))}", ""]
    for host in hosts:
        lines += [
            f"[hosts.{host.name}]",
            f"address = {toml.dumps(host.address)}",
            f"port = {host.port}",
            f"host_key = {toml.dumps(host.host_key)}",
        ]
        if host.lent_python:
            lines.append(f"python = {toml.dumps(host.python)}")
        if host.cache is not None:
            lines.append(f"cache = {toml.dumps(host.cache)}")
        lines.append("")
    return "\n".join([*lines, "[groups]", f'lab = ["node[1-{len(hosts)}]"]', ""])


def _host(kind: Kind, fields: dict[str, Any]) -> LabHost:
    fields |= {"identity": Path(fields["identity"]), "folder": Path(fields["folder"])}
    if kind == "loopback":
        return LoopbackHost(**fields)
    return NamespaceHost(**fields | {"network": Network(**fields["network"]), "lent": tuple(fields["lent"])})
