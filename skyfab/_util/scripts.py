"""Shell scripts and Python programs that are sent to hosts as text: files beside the modules that send them."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Final

_OPEN: Final = re.compile(r"(^|[ ;])(then|do|else|in)$|[{;&|]$")
"""The end of a line whose command continues on the next line."""


def read(path: str) -> str:
    """Reads a file below skyfab/, without what a host does not need: comment lines, empty lines, and a script's indent.

    A script may have none of these inside quotes.
    """
    text = (Path(__file__).parents[1] / path).read_text(encoding="utf-8")
    text = re.sub(r"^ *(#.*)?\n", "", text, flags=re.MULTILINE)
    return re.sub("^ +", "", text, flags=re.MULTILINE) if path.endswith(".sh") else text


def given(*arguments: str, **values: str | int) -> str:
    """The lines that set a script's variables and arguments; they go before the script.

    >>> given("numpy", digest="1a2b", python="/opt/my python")
    "digest=1a2b python='/opt/my python'\\nset -- numpy\\n"
    """
    variables = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in values.items())
    return f"{variables}\nset -- {shlex.join(arguments)}\n"


def one_line(script: str) -> str:
    """Joins the lines of a script. A line ends a command, unless it ends with an operator, a keyword or a pattern.

    >>> one_line('case $x in\\na)\\nx=$(pwd)\\n;;\\nesac\\nif true &&\\nfalse; then\\necho\\nfi\\n')
    'case $x in a) x=$(pwd); ;; esac; if true && false; then echo; fi'
    """
    joined = ""
    for line in script.splitlines():
        joined += line
        joined += " " if _OPEN.search(line) or line.count(")") > line.count("(") else "; "
    return joined.removesuffix("; ")


def spelled(word: str) -> str:
    """Encodes `word` in characters that no shell interprets; ``printf %b`` decodes it."""
    return re.sub(r"[^A-Za-z0-9/._~-]", lambda m: "".join(f"\\0{byte:03o}" for byte in os.fsencode(m[0])), word)
