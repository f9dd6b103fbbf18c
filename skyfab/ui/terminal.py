"""Terminal output: removes control sequences from untrusted text, and redraws live lines below the scrolling output."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Any, Final, TextIO

_ESCAPES: Final = re.compile(
    r"(?P<colour>\x1b\[[0-9;:]{0,64}m)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # moves the cursor, clears the screen, requests reports
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f]).*?(?:\x07|\x1b\\|\x9c|$)"  # sets the title, the clipboard and so on
    r"|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]",  # the last ones change the order
    re.DOTALL,
)
RESET: Final = "\x1b[0m"


def clean(text: str, *, colour: bool = True) -> str:
    """An untrusted line without terminal control sequences. Colours may be kept, and are reset at its end."""
    if text.isprintable():
        return text
    text = _ESCAPES.sub((lambda match: match["colour"] or "") if colour else "", text)
    return text + RESET if "\x1b" in text else text


def clean_lines(text: str) -> str:
    """As `clean`, for several lines, without colours."""
    return "\n".join(clean(line, colour=False) for line in text.split("\n"))


def settled(line: str) -> str:
    """A line without what was overwritten in it: the last state of a progress bar."""
    return line.rstrip("\r").rpartition("\r")[2]


def is_rich(*files: TextIO | None) -> bool:
    """All files are a terminal that can move its cursor, in UTF-8."""
    return os.environ.get("TERM", "") not in ("", "dumb", "unknown") and all(
        file is not None and file.isatty() and "utf" in (file.encoding or "").lower() for file in files
    )


def ipython() -> Any:
    """IPython's shell, if this program runs in one; else None."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def is_notebook() -> bool:
    """This program is the kernel of a notebook."""
    return getattr(ipython(), "kernel", None) is not None


def has_colours() -> bool:
    """NO_COLOR is not set: it takes colours away, and nothing else."""
    return not os.environ.get("NO_COLOR")


unwritten: Final[list[OSError]] = []
"""Why standard output could not be written, as to a full disk. Calls continue; a command ends with it."""


def put(file: TextIO | None, text: str) -> None:
    """Writes and flushes text; escapes characters that the file's encoding lacks."""
    if file is None:  # a program without a console
        return
    try:
        try:
            file.write(text)
        except UnicodeEncodeError:
            encoding = file.encoding or "ascii"
            file.write(text.encode(encoding, "backslashreplace").decode(encoding))
        file.flush()
    except OSError as error:
        if file is sys.stdout:
            unwritten.append(error)
        raise


class LiveLines:
    """Lines at the bottom of a terminal that are redrawn in place, while other output scrolls above them.

    The cursor stays on the first of them: what another part of the program prints overwrites them, and is kept.
    """

    def __init__(self) -> None:
        self._drawn: list[str] = []

    def frame(self, above: str, live: Sequence[str]) -> str:
        """The text to write: `above` is permanent, `live` stays until the next frame. Empty if nothing changes."""
        size = shutil.get_terminal_size()
        shown = fitting([line.expandtabs()[: size.columns + 64] for line in live], size.lines - 1)
        if not above and shown == self._drawn:
            return ""
        # The program may have printed a part of a line. Then as many spaces as a line has end on the next one.
        fresh = "" if self._drawn else " " * size.columns
        self._drawn = shown
        # Without line wrapping a line takes one row, whatever the widths of its characters and the window's size.
        rows = "\n".join(f"\x1b[?7l{line}\x1b[?7h" for line in map(_reset, shown))
        back = "" if not shown else "\r" if len(shown) == 1 else f"\r\x1b[{len(shown) - 1}A"
        return f"{fresh}\r\x1b[J{above}{rows}{back}"


def _reset(line: str) -> str:
    return line + RESET if "\x1b" in line else line


def fitting(lines: Sequence[str], room: int) -> list[str]:
    """Limits the lines to as many as the cursor can move back over."""
    room = max(room, 2)
    return list(lines) if len(lines) <= room else [*lines[: room - 1], f"… and {len(lines) - room + 1} more"]
