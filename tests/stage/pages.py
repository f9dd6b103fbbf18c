"""The documents as a person types them: the commands of a page's console blocks, with what the page says they print."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = re.compile(r"(?:^<!-- not run here: ([^\n]+) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PART = re.compile(r"^# (?:before block (\d+)|(after the last block))\n", re.MULTILINE)
_END = "--- end of command"


@dataclass
class Typed:
    """A command, and the lines that the page shows below it."""

    command: str
    shown: list[str] = field(default_factory=list)


def blocks(page: Path, language: str) -> list[str]:
    """The text of all blocks in a language."""
    return [text for _, found, text in _BLOCK.findall(page.read_text()) if found == language]


def run_here(page: Path, language: str) -> list[str]:
    """Those without a comment before them that says why tests do not run them."""
    return [text for reason, found, text in _BLOCK.findall(page.read_text()) if found == language and not reason]


def reasons(page: Path) -> list[str]:
    """Why blocks are not run."""
    return [reason for reason, _, _ in _BLOCK.findall(page.read_text()) if reason]


def program(page: Path, parts: Path) -> str:
    """The Python blocks of a page as one program, with what a page takes for granted.

    That is in `parts`: names that a reader has already, at the top or after ``# before block N``; and what must be true
    in the end, after ``# after the last block``.
    """
    first, *rest = _PART.split(parts.read_text() if parts.exists() else "")
    given = {int(number or 0): text for number, _, text in zip(*[iter(rest)] * 3, strict=True)}
    pieces = [first]
    for number, block in enumerate(run_here(page, "python"), 1):
        pieces += [given.pop(number, ""), block]
    pieces.append(given.pop(0, ""))
    assert not given, f"{page.name} has no block {sorted(given)}"
    return "\n".join(pieces)


def commands(page: Path) -> list[Typed]:
    """All commands of a page, in order."""
    found: list[Typed] = []
    for block in run_here(page, "console"):
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


def alike(printed: Sequence[str], shown: Sequence[str]) -> bool:
    """Whether a command printed what the page shows; of a line that ends with an ellipsis, the rest may be anything."""
    found, wanted = masked(printed), masked(shown)
    return len(found) == len(wanted) and all(
        line.startswith(want[:-1]) if want.endswith("…") else line == want
        for line, want in zip(found, wanted, strict=True)
    )
