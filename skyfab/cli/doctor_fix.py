"""Writes findings' settings into an inventory.toml: shown first, and with everything else in the file as it was."""

from __future__ import annotations

import difflib
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from skyfab._util import toml
from skyfab.errors import UsageError
from skyfab.inspect.doctor.finding import Finding
from skyfab.inventory.file import bare
from skyfab.inventory.inventory import Inventory
from skyfab.inventory.toml_lines import lines_by_key
from skyfab.ui.prompt import answer


def offer(findings: Sequence[Finding], inventory: Inventory, *, yes: bool) -> bool:
    """Shows what would change in the inventory, asks unless `yes`, and writes it; returns whether it did.

    Raises UsageError without a terminal to ask at, or no file that could be changed.
    """
    wanted: dict[str, dict[str, str]] = {}
    for one in findings:
        if one.setting is not None:
            wanted.setdefault(one.host, {}).setdefault(*one.setting)
    if not wanted:
        print("nothing to change in the inventory")
        return False
    path = inventory.source
    if path is None or path.suffix != ".toml" or not path.is_file():
        raise UsageError(
            "--fix changes an inventory.toml, and these hosts come from another source",
            hint="skyfab hosts --from=SOURCE --toml > inventory.toml makes one",
        )
    content = path.read_bytes().decode()
    line_end = "\r\n" if "\r\n" in content else "\n"
    old = content.replace(line_end, "\n")
    new, by_hand = changed(old, wanted)
    for line in by_hand:
        print(f"to be written by hand: {line}")
    if new == old:
        return False
    Inventory.parse(new, path)  # a mistake of ours must not reach the file
    diff = difflib.unified_diff(old.splitlines(), new.splitlines(), str(path), str(path), n=1, lineterm="")
    print("\n".join(diff))
    if not yes and not _agreed(path):
        return False
    _write(path, new.replace("\n", line_end))
    print(f"written: {path}")
    return True


def changed(text: str, wanted: Mapping[str, Mapping[str, str]]) -> tuple[str, list[str]]:
    """The text with these keys set, by host; and what cannot be set, since the host has no table of its own.

    >>> changed('[hosts.a]  # mine\\nuser = "ada"\\n', {"a": {"cache": '"/x"'}, "b": {"cache": '"/y"'}})
    ('[hosts.a]  # mine\\ncache = "/x"\\nuser = "ada"\\n', ['[hosts.b] cache = "/y"'])
    """
    at = lines_by_key(text)
    lines = text.split("\n")
    replaced: dict[int, str] = {}
    added: dict[int, list[str]] = {}
    by_hand = []
    for host, keys in wanted.items():
        table = at.get(("hosts", host))
        header = table is not None and re.match(r"\s*\[", lines[table - 1])
        for key, value in keys.items():
            line = at.get(("hosts", host, key))
            if table is None or not header or (line is not None and not _is_whole(lines[line - 1])):
                by_hand.append(f"[hosts.{bare(host)}] {key} = {value}")
            elif line is not None:
                replaced[line] = f"{key} = {value}"
            else:
                added.setdefault(table, []).append(f"{key} = {value}")
    new = []
    for number, old in enumerate(lines, 1):
        new += [replaced.get(number, old), *added.get(number, [])]
    return "\n".join(new), by_hand


def _is_whole(line: str) -> bool:
    """Whether a key's value ends on its line."""
    try:
        return bool(toml.loads(line))
    except ValueError:
        return False


def _agreed(path: Path) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("there is no terminal to confirm at", hint="look at it, then type it again with --yes")
    return answer(f"write this to {path}? [y/N] ").lower() in ("y", "yes")


def _write(path: Path, text: str) -> None:
    """Replaces the file, or what it is a link to, at once: a reader sees the old one or the new one."""
    place = path.resolve()
    try:
        descriptor, draft = tempfile.mkstemp(dir=place.parent, prefix=".skyfab-")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(draft).chmod(place.stat().st_mode & 0o777)
        Path(draft).replace(place)
    except OSError as error:
        raise UsageError(f"{place} cannot be written: {error.strerror}", hint="copy the lines above by hand") from None
