"""Splits the output of a worker into lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, Literal

_ENDS: Final = re.compile(rb"\r\n|\n|\r")
_LONGEST: Final = 256 * 1024
"""A longer line is split, so that an endless line cannot fill the memory."""


class Lines:
    """Lines of one stream of one process; a carriage return ends a line that will be overwritten."""

    __slots__ = ("_pieces", "_rest", "stream")

    def __init__(self, stream: Literal["stdout", "stderr"], pieces: list[tuple[str, str]] | None = None) -> None:
        self.stream = stream
        self._rest = b""
        self._pieces = pieces or []

    def feed(self, data: bytes) -> Lines | None:
        """Returns the lines that `data` completes, if any."""
        data = self._rest + data
        if b"\r" not in data:
            *whole, self._rest = data.split(b"\n")
            pieces = [(line.decode(errors="replace"), "\n") for line in whole]
        else:
            pieces, at = [], 0
            for end in _ENDS.finditer(data):
                if end[0] == b"\r" and end.end() == len(data):
                    break  # a line feed may follow
                text = data[at : end.start()]
                at = end.end()
                if text or end[0] != b"\r":
                    pieces.append((text.decode(errors="replace"), "\r" if end[0] == b"\r" else "\n"))
            self._rest = data[at:]
        if len(self._rest) > _LONGEST:
            cut = len(self._rest)
            while cut > len(self._rest) - 4 and self._rest[cut - 1] & 0xC0 == 0x80:
                cut -= 1  # do not split a UTF-8 character
            cut -= self._rest[cut - 1] >= 0xC0
            pieces.append((self._rest[:cut].decode(errors="replace"), "\n"))
            self._rest = self._rest[cut:]
        return Lines(self.stream, pieces) if pieces else None

    @property
    def partial(self) -> bool:
        return bool(self._rest)

    def rest(self) -> Lines:
        """Returns and clears the incomplete last line."""
        text, self._rest = self._rest, b""
        return Lines(self.stream, [(text.rstrip(b"\r").decode(errors="replace"), "\n")])

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """The text and the line ending of each line."""
        return iter(self._pieces)
