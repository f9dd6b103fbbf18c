"""TOML: reads documents, and writes strings."""

from __future__ import annotations

import json
import sys
from typing import Any


def loads(text: str) -> dict[str, Any]:
    """Raises ValueError."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # imported here: hosts have modules that import this one, and not tomli
    document: dict[str, Any] = tomllib.loads(text)
    return document


def dumps(value: object) -> str:
    """A string or a list of strings in TOML, whose syntax for them is that of JSON."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
