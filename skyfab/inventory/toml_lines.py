"""Finds the lines of a TOML document on which its tables and keys are, which the parser does not tell."""

from __future__ import annotations

import re
from typing import Final

from skyfab._util import toml
from skyfab.inventory.text import lines_of

_PART: Final = r"(?:\"(?:[^\"\\]|\\.)*\"|'[^']*'|[A-Za-z0-9_-]+)"
_DOTTED: Final = rf"({_PART}(?:[ \t]*\.[ \t]*{_PART})*)"
_TABLE: Final = re.compile(rf"[ \t]*\[\[?[ \t]*{_DOTTED}[ \t]*\]")
_KEY: Final = re.compile(rf"[ \t]*{_DOTTED}[ \t]*=")
_LONG: Final = ('"' * 3, "'" * 3)
"""The quotes of strings that go over several lines."""


def lines_by_key(text: str) -> dict[tuple[str, ...], int]:
    """The first line of each table and key, by its path, in a valid document.

    Keys inside inline tables are not found; the key of the table is.

    >>> lines_by_key('[hosts.node1]\\nport = 22')
    {('hosts',): 1, ('hosts', 'node1'): 1, ('hosts', 'node1', 'port'): 2}
    """
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    inside = ""
    for number, line in enumerate(lines_of(text), 1):
        if inside:
            inside = "" if line.count(inside) % 2 else inside
            continue
        if match := _TABLE.match(line):
            path = table = _parts(match[1])
        elif match := _KEY.match(line):
            path = (*table, *_parts(match[1]))
            inside = next((quotes for quotes in _LONG if line.count(quotes) % 2), "")
        else:
            continue
        for size in range(1, len(path) + 1):
            found.setdefault(path[:size], number)
    return found


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(_unquoted(part) for part in re.findall(_PART, dotted))


def _unquoted(part: str) -> str:
    try:
        return str(toml.loads(f"key = {part}")["key"]) if part[0] in "\"'" else part
    except ValueError:  # in a line without a key, such as one of an array
        return part
