"""The terminal: what may be shown on one, and a few live lines below all that scrolls by."""

from __future__ import annotations

import os
import re
import shutil
import sys
import termios
from collections.abc import Sequence
from typing import Final, TextIO

_ESCAPES: Final = re.compile(
    r"(?P<colour>\x1b\[[0-9;:]{0,64}m)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # moves the cursor, clears, reports
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f]).*?(?:\x07|\x1b\\|\x9c|$)"  # sets the title, the clipboard …
    r"|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f]",
    re.DOTALL,
)
RESET: Final = "\x1b[0m"


def clean(text: str, *, colour: bool = True) -> str:
    """A line from elsewhere without anything that could steer this terminal; colours may stay, and end with it."""
    if text.isprintable():
        return text
    text = _ESCAPES.sub((lambda match: match["colour"] or "") if colour else "", text)
    return text + RESET if "\x1b" in text else text


def clean_lines(text: str) -> str:
    """The same for several lines, without colours."""
    return "\n".join(clean(line, colour=False) for line in text.split("\n"))


def is_rich(*files: TextIO | None) -> bool:
    """All of these are one terminal that can move its cursor, and nobody asked for less."""
    return (
        not os.environ.get("NO_COLOR")
        and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
        and all(file is not None and file.isatty() and "utf" in (file.encoding or "").lower() for file in files)
    )


def put(file: TextIO | None, text: str) -> None:
    """Writes all of it now, spelling out characters that the file's encoding lacks."""
    if file is None:  # a program without a console
        return
    try:
        file.write(text)
    except UnicodeEncodeError:
        encoding = file.encoding or "ascii"
        file.write(text.encode(encoding, "backslashreplace").decode(encoding))
    file.flush()


def echoes() -> bool:
    """Whether what is typed shows. It does not while somebody is asked for a password: the screen is theirs then."""
    try:
        return bool(termios.tcgetattr(sys.stderr.fileno())[3] & termios.ECHO)
    except (OSError, ValueError, AttributeError, termios.error):
        return True


class Live:
    """Lines at the bottom of a terminal that are drawn anew in their place, while others scroll by above them.

    The cursor waits on the first of them: what another part of the program prints meanwhile goes over them and stays.
    """

    def __init__(self) -> None:
        self._drawn: list[str] = []

    def frame(self, above: str, live: Sequence[str]) -> str:
        """What to write: `above` goes for good, `live` until the next frame. Empty when nothing changes."""
        size = shutil.get_terminal_size()
        fitting = _fitting([line.expandtabs()[: size.columns + 64] for line in live], size.lines - 1)
        if not above and fitting == self._drawn:
            return ""
        erase = "\r\x1b[J" if self._drawn else ""
        self._drawn = fitting
        # Without wrapping a line takes one row, whatever its characters' widths and the window's size are.
        rows = "\n".join(f"\x1b[?7l{line}{RESET}\x1b[?7h" for line in fitting)
        back = "" if not fitting else "\r" if len(fitting) == 1 else f"\r\x1b[{len(fitting) - 1}A"
        return erase + above + rows + back


def _fitting(lines: list[str], room: int) -> list[str]:
    """As many as the cursor can come back over."""
    room = max(room, 2)
    return lines if len(lines) <= room else [*lines[: room - 1], f"… and {len(lines) - room + 1} more"]
