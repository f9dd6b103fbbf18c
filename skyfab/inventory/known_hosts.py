"""Reads the names of hosts in known_hosts: those that the user has logged in to. Hashed names cannot be read."""

from __future__ import annotations

import os
import re
from typing import Final

from skyfab.errors import InventoryError
from skyfab.inventory.host import Address, expanded
from skyfab.inventory.source import lines_of, read_text

_FILE: Final = "~/.ssh/known_hosts"
_SERVICES: Final = re.compile(
    r"(.*\.)?(github|gitlab|bitbucket|codeberg|sr|azure|visualstudio)\.(com|org|ht)|.*\.hf\.co"
)
"""They take keys, and run no programs."""


def names(path: str | os.PathLike[str] = _FILE) -> list[str]:
    """One name for each host, as ``node1`` or ``10.0.0.5:2222``, in the order of the file. None without a file."""
    try:
        entries = [line.split() for line in lines_of(read_text(expanded(os.fspath(path))))]
    except InventoryError:
        return []
    first = [words[0].split(",")[0] for words in entries if len(words) >= 3 and not words[0].startswith(("#", "@"))]
    found = dict.fromkeys(re.sub(r"^\[(.+)\]:([0-9]+)$", _with_port, name) for name in first)
    return [name for name in found if Address.parse(name) is not None and not _SERVICES.fullmatch(name)]


def _with_port(match: re.Match[str]) -> str:
    host = f"[{match[1]}]" if ":" in match[1] else match[1]
    return f"{host}:{match[2]}"
