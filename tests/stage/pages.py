"""The documents as a person types them: the commands of a page's console blocks, with what the page says they print."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_END = "--- end of command"


@dataclass
class Typed:
    """A command, and the lines that the page shows below it."""

    command: str
    shown: list[str] = field(default_factory=list)


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in _BLOCK.findall(page.read_text()) if found == language]


def commands(page: Path) -> list[Typed]:
    """All commands of a page, in order."""
    found: list[Typed] = []
    for block in blocks(page, "console"):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append(Typed(line[2:]))
            else:
                found[-1].shown.append(line)
    return found


def type_all(typed: Sequence[Typed], folder: Path, environ: Mapping[str, str], timeout: float) -> list[list[str]]:
    """Types the commands into one shell, one after another; returns what each printed. Raises if one fails."""
    script = "".join(
        f"{one.command} || {{ echo 'failed: {n}'; exit 1; }}\necho '{_END}'\n" for n, one in enumerate(typed)
    )
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout
    return [part.strip("\n").splitlines() for part in done.stdout.split(f"{_END}\n")[: len(typed)]]


def masked(lines: Sequence[str]) -> list[str]:
    """Lines with numbers masked, sorted: ranks and hosts answer in any order.

    >>> masked(["b 0.25 s", "a  12"])
    ['a #', 'b # s']
    """
    return sorted(" ".join(re.sub(r"\d+(\.\d+)?", "#", line).split()) for line in lines)
