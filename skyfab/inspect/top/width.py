"""How many columns of a terminal a text takes, and texts cut or filled to a number of columns."""

from __future__ import annotations

from unicodedata import category, east_asian_width


def width(text: str) -> int:
    """
    >>> width("node1"), width("ノード"), width("e\\u0301")
    (5, 6, 1)
    """
    return len(text) if text.isascii() else sum(map(_columns, text))


def _columns(char: str) -> int:
    if category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if east_asian_width(char) in "WF" else 1


def cut(text: str, columns: int) -> str:
    """The text, shortened with … where it is wider.

    >>> cut("node1", 5), cut("node12", 5), cut("ノード", 4), cut("node1", 0)
    ('node1', 'node…', 'ノ…', '')
    """
    if width(text) <= columns:
        return text
    taken, kept = 0, ""
    for char in text:
        taken += _columns(char)
        if taken > columns - 1:
            break
        kept += char
    return kept + "…" if columns > 0 else ""


def fill(text: str, columns: int, *, right: bool = False) -> str:
    """The text in exactly so many columns."""
    text = cut(text, columns)
    blanks = " " * (columns - width(text))
    return blanks + text if right else text + blanks


def wrap(text: str, columns: int) -> list[str]:
    """The text in lines of so many columns.

    >>> wrap("node1", 5), wrap("node12", 5), wrap("ノード", 5), wrap("", 5)
    (['node1'], ['node1', '2'], ['ノー', 'ド'], [''])
    """
    if width(text) <= columns:
        return [text]
    lines, taken = [""], 0
    for char in text:
        taken += _columns(char)
        if taken > columns:
            lines.append("")
            taken = _columns(char)
        lines[-1] += char
    return lines
