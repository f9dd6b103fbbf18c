"""Tells the sources of hosts apart: words such as ``slurm``, and files by what is in them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from skyfab._util import toml
from skyfab.errors import InventoryError
from skyfab.inventory import ansible_files, file, hostfile, slurm, ssh_config
from skyfab.inventory.file import Contents
from skyfab.inventory.host import expanded
from skyfab.inventory.text import lines_of, read_text

_NAMED: Final = ("hostfile", "ansible")
"""Kinds of files that can be said, as in ``hostfile:PATH``."""
_WORD: Final = re.compile(rf"slurm|ssh_config(:.*)?|({'|'.join(_NAMED)}):.+", re.DOTALL)


def is_word(given: object) -> bool:
    """Whether this is the word of a source, and not the path of a file."""
    return isinstance(given, str) and _WORD.fullmatch(given) is not None


def read(given: str | os.PathLike[str]) -> Contents:
    """The hosts of a source: its word, or the path of a file. Raises InventoryError."""
    if given == "slurm":
        return slurm.read(os.environ)
    word, colon, rest = os.fspath(given).partition(":")
    if is_word(given) and word == "ssh_config":
        return ssh_config.read(rest if colon else "*")
    kind, path = (word, expanded(rest)) if is_word(given) else ("", Path(given))
    text = read_text(path, hint="check the path given; inventory.example.toml is one to copy")
    kind = kind or kind_of(text, str(path))
    if kind == "toml":
        return file.read(text, str(path))
    if kind == "hostfile":
        return hostfile.read(text, str(path))
    return ansible_files.read(text, str(path), path.parent)


def kind_of(text: str, path: str) -> str:
    """What a file is: ``toml``, ``hostfile`` or ``ansible``. Raises InventoryError if that cannot be told."""
    if path.endswith(".toml"):
        return "toml"
    if path.endswith((*ansible_files.YAML, ".ini", ".cfg")):
        return "ansible"
    lines = [line for line in map(str.strip, lines_of(text)) if line and line[0] not in "#;"]
    if not lines or _is_toml(text, lines):
        return "toml"
    if ansible_files.is_yaml(text) or any(line.startswith("[") or "ansible_" in line for line in lines):
        return "ansible"
    if any(re.search(r"\b(slots|count|cpu)\s*=", line) for line in lines):
        return "hostfile"
    if any(":" in line for line in lines):
        raise InventoryError(
            f"{path}: is {lines[0][:60]!r} a host's slots, as for MPI, or its port, as for Ansible?",
            hint=f"say which: hostfile:{path} or ansible:{path}",
        )
    return "hostfile"


def _is_toml(text: str, lines: list[str]) -> bool:
    """Whether it is an inventory.toml, also one with mistakes."""
    if any(re.match(r"\[\s*hosts\s*\.|\[\s*defaults\s*\]", line) for line in lines):
        return True
    try:
        return not {"defaults", "hosts", "groups"}.isdisjoint(toml.loads(text))
    except (ValueError, RecursionError):
        return False
