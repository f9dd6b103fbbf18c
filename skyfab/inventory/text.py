"""Reads the text of files that list hosts; raises InventoryError if that fails."""

from __future__ import annotations

import os
from pathlib import Path

from skyfab.errors import InventoryError


def read_text(path: str | os.PathLike[str], hint: str = "check the path", *, strict: bool = True) -> str:
    """The text of a file. Raises InventoryError if the file is not readable, or not text.

    If not `strict`, bytes that are not UTF-8 are accepted, as in comments of files that other programs read.
    """
    name = os.fspath(path)
    try:
        text = Path(path).read_bytes().decode("utf-8-sig", "strict" if strict else "backslashreplace")
    except OSError as error:
        raise InventoryError(f"{name}: {error.strerror}", hint=hint) from None
    except ValueError as error:  # not UTF-8, or a NUL in the path
        raise InventoryError(f"{name!r}: not a text file ({error})", hint="save it as UTF-8") from None
    if "\0" in text:
        raise InventoryError(f"{name}: not a text file (contains NUL bytes)", hint="check the path")
    return text


def lines_of(text: str) -> list[str]:
    """The lines of a text. Only line feeds end them, with or without carriage return: not all that Unicode has."""
    return [line.removesuffix("\r") for line in text.split("\n")]
