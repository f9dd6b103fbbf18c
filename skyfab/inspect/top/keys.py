"""The keys that a terminal sends, by name."""

from __future__ import annotations

import re
from typing import Final

_KEY: Final = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1bO.|\x1b|[\x00-\x7f]|[\x80-\xff]+", re.DOTALL)
_LETTERS: Final = {"A": "up", "B": "down", "C": "right", "D": "left", "H": "home", "F": "end", "M": "enter", "Z": "tab"}
_NUMBERS: Final = {1: "home", 4: "end", 5: "pageup", 6: "pagedown", 7: "home", 8: "end"}
_CONTROL: Final = {"\r": "enter", "\n": "enter", "\t": "tab", "\x1b": "escape", "\x0c": "redraw"}
_NAMES: Final = {
    key.encode(): name
    for key, name in (
        *((f"\x1b{lead}{letter}", name) for lead in "[O" for letter, name in _LETTERS.items()),
        *((f"\x1b[{number}~", name) for number, name in _NUMBERS.items()),
        *_CONTROL.items(),
    )
}


def decode(data: bytes) -> list[str]:
    """The names of special keys, and other characters as they are; unknown sequences are left out.

    >>> decode(b"j\\x1b[A\\x1bOB\\x1b[6~\\x1b[1;5Cq\\x1b")
    ['j', 'up', 'down', 'pagedown', 'q', 'escape']
    """
    found = [_NAMES.get(key) or (key.decode(errors="ignore") if key[0] >= 32 else "") for key in _KEY.findall(data)]
    return [key for key in found if key]


def is_partial(data: bytes) -> bool:
    """Whether the rest of a key may still come."""
    return re.search(rb"\x1b(?:[\[O][0-9;?]*)?\Z", data) is not None
