"""The English of messages, help and documentation: phrases that sound translated stay out."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = [path for folder in ("skyfab", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]

TEXT = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}

INSTEAD = {
    r"\b(?<!there )(is|are|was|were) no (?!longer\b|more than\b)\w": "is not a …, or unknown …",
    r"\b(is|are) none\b(?<!there is none)(?<!there are none)": "is not one, or has none",
    r"\bso (many|much) (?!that\b|as\b)": "this many, or the number itself",
    r"\bnone such\b": "no such …",
    r"\b(was|were|is|are|be|been|has|have) told\b": "received, reported, was sent",
    r"\bcannot be(?=[.:,;]|$)": "invalid …: expected …",
    r"\b(go|goes|going|went) on\b": "continue, resume, keep running",
    r"\b(it|that|which|files?|folders?|modules?|what|data|everything|things) lies?\b": "is in, is stored in",
    r"\bEnds with \d": "Exits with …",
    r"\bis nothing that\b": "unknown …",
    r"\bnothing there is called\b": "no file matches …",
    r"\bfits? none\b|\bno \w+ fits\b": "matches",
    r"\bsay it again\b": "repeat the command",
    r"\bas far as\b": "if, or what …",
    r"\bin place of\b": "instead of",
    r"\bany more\b": "no longer",
    r"\banew\b": "again",
    r"\bwithout end\b": "endlessly",
    r"\b(no|enough|without) room\b": "not enough space",
    r"\bfrom \d+ on\b": "… or more",
    r"\bterminal to \w+ at\b": "there is no terminal for a prompt",
    r"\bthrow-?away\b": "temporary",
    r"\bworking director(y|ies)\b": "working folder",
}
"""Phrases, and what to write instead."""

IN_PAGES = {
    r"\bat once\b": "immediately, in parallel, or together",
    r"\bof (its|their|one's) own\b(?! [a-z])": "its own …",
    r"\b(is|are) waited for\b": "… waits for",
    r"\b(trained|built|averaged|evaluated|sent|copied|raised|found) (here|there)\b": "on this machine, or on the host",
}
"""The same for pages alone; a line of the generated map, which has docstrings, may have them."""


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a page that people read, without the names of tests; the strings and comments of a program."""
    text = path.read_text()
    if path.suffix == ".md":
        for number, line in enumerate(text.splitlines(), 1):
            yield number, re.sub(r"`test_\w+`", "", line)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in TEXT:
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


def uses(phrases: dict[str, str], paths: list[Path]) -> list[str]:
    """Where phrases occur, and what to write instead."""
    any_of_them = re.compile("|".join(phrases))
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:90]} → {better}"
        for path in paths
        for number, line in prose(path)
        if any_of_them.search(line)
        for phrase, better in phrases.items()
        if re.search(phrase, line)
    ]


def test_phrases_that_sound_translated_are_not_used() -> None:
    found = uses(INSTEAD, [*PAGES, *PROGRAMS]) + [line for line in uses(IN_PAGES, PAGES) if "│" not in line]
    assert not found, "\n".join(found)
