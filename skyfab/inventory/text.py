"""Reads the files that list hosts: text of a sensible size, or an InventoryError."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from skyfab.errors import InventoryError

_LARGEST: Final = 4 * 1024 * 1024
"""Bytes. A device such as /dev/zero has no end."""


def read_text(path: str | os.PathLike[str], hint: str = "check the path", *, strict: bool = True) -> str:
    """The text of a file. Raises InventoryError if it cannot be read, is too large or is no text.

    If not `strict`, bytes that are not UTF-8 are accepted, as in comments of files that other programs read.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(_LARGEST + 1)
        text = content.decode("utf-8-sig", "strict" if strict else "backslashreplace")
    except OSError as error:
        raise InventoryError(f"{os.fspath(path)}: cannot be read: {error.strerror}", hint=hint) from None
    except ValueError as error:  # not UTF-8, or a NUL in the path
        raise InventoryError(f"{os.fspath(path)!r}: is not a text file: {error}", hint="save it as UTF-8") from None
    if len(content) > _LARGEST:
        raise InventoryError(f"{os.fspath(path)}: is larger than {_LARGEST >> 20} MiB", hint="is it another file?")
    if "\0" in text:
        raise InventoryError(f"{os.fspath(path)}: is not a text file: it has NULs", hint="is it another file?")
    return text


def lines_of(text: str) -> list[str]:
    """The lines of a text. Only line feeds end them, with or without carriage return: not all that Unicode has."""
    return [line.removesuffix("\r") for line in text.split("\n")]
