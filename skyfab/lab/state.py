"""What a lab writes down: state.json for whoever comes back to it, inventory.toml for its users."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

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
    """A lab as it was started. What of it runs, each host's folder tells."""

    kind: Kind
    hosts: tuple[LabHost, ...]
    password: str
    limits: tuple[str, ...]

    def save(self, folder: Path) -> None:
        """Writes both files, for this user's eyes only."""
        write(folder / INVENTORY, inventory(self.hosts))
        write(folder / STATE, json.dumps(asdict(self), default=str, indent=1))

    @classmethod
    def load(cls, folder: Path) -> Record:
        """Raises UsageError when no lab is in the folder."""
        try:
            state = json.loads((folder / STATE).read_text())
            hosts = tuple(_host(state["kind"], fields) for fields in state["hosts"])
            return cls(kind=state["kind"], hosts=hosts, password=state["password"], limits=tuple(state["limits"]))
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(f"no lab is up in {folder}", hint="skyfab lab.up") from None
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{folder / STATE} is not the record of a lab: {error!r}") from error


def inventory(hosts: Sequence[LabHost]) -> str:
    """The hosts as an inventory file; its group `lab` is all of them."""
    first = hosts[0]
    lines = ["[defaults]", f"user = {_quoted(first.user)}", f"identity = {_quoted(str(first.identity))}", ""]
    for host in hosts:
        lines += [
            f"[hosts.{host.name}]",
            f"address = {_quoted(host.address)}",
            f"port = {host.port}",
            f"host_key = {_quoted(host.host_key)}",
        ]
        if host.lent_python:
            lines.append(f"python = {_quoted(host.python)}")
        if host.cache is not None:
            lines.append(f"cache = {_quoted(host.cache)}")
        lines.append("")
    return "\n".join([*lines, "[groups]", f'lab = ["node[1-{len(hosts)}]"]', ""])


def write(path: Path, text: str) -> None:
    """Writes a file that only this user can read, whole or not at all."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.touch(0o600)
    fresh.write_text(text)
    fresh.replace(path)


def _host(kind: Kind, fields: dict[str, Any]) -> LabHost:
    fields |= {"identity": Path(fields["identity"]), "folder": Path(fields["folder"])}
    if kind == "loopback":
        return LoopbackHost(**fields)
    return NamespaceHost(**fields | {"network": Network(**fields["network"]), "lent": tuple(fields["lent"])})


def _quoted(text: str) -> str:
    """A TOML string: JSON's rules are a part of TOML's, but for one character that JSON leaves bare."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
