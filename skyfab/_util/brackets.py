"""Splits text at commas, except inside brackets."""

from __future__ import annotations


def split(text: str, brackets: str = "()[]{}") -> list[str]:
    """The parts between commas. Brackets of one kind may close those of another, as in ``[0,1)``.

    >>> split("[64,64],[[8,8],[4,4]]")
    ['[64,64]', '[[8,8],[4,4]]']
    """
    parts, depth = [""], 0
    for char in text:
        depth = max(0, depth + (char in brackets[::2]) - (char in brackets[1::2]))
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return parts
